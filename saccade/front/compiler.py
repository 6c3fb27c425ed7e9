"""Grammars compiled beside the event loop, for `InputProcessor`.

Owns the front's lexicon, the one compiling thread, and the order of its turns. Knows nothing of
prompts, requests or rows; `text/grammar/grammars.py` reads constraints.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLTokenizer

from saccade.core.errors import InvalidRequest
from saccade.core.grammar_vocab import read_lexicon
from saccade.text.grammar.grammars import Grammar, Grammars, OutputConstraint

log = logging.getLogger("saccade")

MakeConstraint = Callable[[LLTokenizer], OutputConstraint | None]
"""A constraint that depends on the lexicon, as a forced tool call does: its tags may be tokens.
Called in the compiler's thread; may raise InvalidRequest. None: any text.
"""


class Compiler:
    """Compiles grammars in one thread, which reads the lexicon first. Clients take turns, and
    requests from one client keep their order. The event loop stays free.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, ends: Sequence[int]) -> None:
        """Begin to read the lexicon. Build this before clients come, for a large vocabulary holds
        the interpreter for half a second.

        `tokenizer_json`, `vocab_size`, `ends`: as in `grammar_vocab.read_lexicon`.
        """
        self._thread = ThreadPoolExecutor(1, "saccade-grammar")
        self._lexicon = self._thread.submit(_read, tokenizer_json, vocab_size, ends)
        self._vocab_size = vocab_size
        self._grammars: Grammars | None = None
        self._busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next client's first

    async def compile(
        self,
        constraint: OutputConstraint | MakeConstraint,
        thinks_until: str | None = None,
        client: str = "",
    ) -> Grammar | None:
        """Compile the grammar for a constraint, or return None if it allows any text.
        `thinks_until`: as in `Grammars.compile`. client: the name for taking turns.

        Raises InvalidRequest whose `param` names the place.
        """
        await self._turn(client)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._compile, constraint, thinks_until
            )
        finally:
            self._pass_on()

    async def _turn(self, client: str) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came all the same
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the client that has waited longest."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

    def _compile(
        self, constraint: OutputConstraint | MakeConstraint, thinks_until: str | None
    ) -> Grammar | None:
        lexicon = self._lexicon.result()  # this thread has read it before anything else
        if lexicon is None:
            raise InvalidRequest(
                "this model's tokenizer cannot be read as one of bytes, so that no grammar can be "
                "kept to: ask for the form in the prompt",
                constraint.param if isinstance(constraint, OutputConstraint) else None,
                "unsupported_parameter",
            )
        if self._grammars is None:
            self._grammars = Grammars(lexicon, self._vocab_size)
        made = constraint if isinstance(constraint, OutputConstraint) else constraint(lexicon)
        return None if made is None else self._grammars.compile(made, thinks_until)


def _read(tokenizer_json: str, vocab_size: int, ends: Sequence[int]) -> LLTokenizer | None:
    try:
        return read_lexicon(tokenizer_json, vocab_size, ends)
    except Exception as error:  # the library raises plain ones, and the model serves without
        log.warning("no structured outputs: %s", str(error)[:300])
        return None
