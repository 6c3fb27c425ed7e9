"""Compiles grammars in a thread, for `HoldAnswer`.

The thread also does slow imports, and reads the tokenizer's vocabulary.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from saccade.core.errors import InvalidRequest
from saccade.text.grammar.call_grammar import Lexicon
from saccade.text.grammar.constraint import OutputConstraint
from saccade.text.prompt.template import Tokenizer

if TYPE_CHECKING:
    from saccade.plugins.grammar.grammars import Grammar, Grammars

log = logging.getLogger("saccade")

MakeConstraint = Callable[[Lexicon], OutputConstraint | None]
"""Creates a constraint that depends on the lexicon, such as a forced tool call, whose tags may be
tokens.

Called in the compiler's thread. May raise InvalidRequest. Returns None if any text is allowed.
"""


class Compiler:
    """Compiles grammars in one thread, so that the event loop is not blocked.

    Clients are served round-robin, and the requests of one client in order.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        """Start reading the lexicon in the compiler's thread.

        vocab_size, ends: as in `vocabulary.read_lexicon`.
        """
        self._thread = ThreadPoolExecutor(1, "saccade-grammar")
        self._grammars = self._thread.submit(_read, tokenizer, vocab_size, ends)
        self._busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, the next one first

    async def compile(
        self,
        constraint: OutputConstraint | MakeConstraint,
        thinks_until: str | None = None,
        client: str = "",
    ) -> Grammar | None:
        """Compile the grammar for a constraint, or return None if it allows any text.

        thinks_until: as in `Grammars.compile`.
        client: the client's name, for round-robin.

        Raises InvalidRequest with the location of an error in `param`.
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
            if turn.done() and not turn.cancelled():  # the turn had been granted before
                self._pass_on()
            raise

    def _pass_on(self) -> None:
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
        grammars = self._grammars.result()  # the thread's first job, so it is done
        if grammars is None:
            raise InvalidRequest(
                "this model's tokenizer is not byte-level, so grammars are not supported: "
                "describe the format in the prompt",
                constraint.param if isinstance(constraint, OutputConstraint) else None,
                "unsupported_parameter",
            )
        if not isinstance(constraint, OutputConstraint):
            made = constraint(grammars.lexicon)
        else:
            made = constraint
        return None if made is None else grammars.compile(made, thinks_until)


def _read(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> Grammars | None:
    from saccade.plugins.grammar.grammars import Grammars
    from saccade.plugins.grammar.vocabulary import read_lexicon

    try:
        return Grammars(read_lexicon(tokenizer.json, vocab_size, ends), vocab_size)
    except Exception as error:  # llguidance has no exception types; serve without grammars
        log.warning("no structured outputs: %s", str(error)[:300])
        return None
