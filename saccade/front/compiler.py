"""Grammars that are compiled beside the event loop, for `Intake`.

Owns the front's lexicon and the one thread that compiles. Knows nothing of prompts, requests or
rows; what a wish may say is `text/grammar.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLTokenizer

from saccade.core.errors import InvalidRequest
from saccade.core.lexicon import read_lexicon
from saccade.text.grammar import Grammar, Grammars, Wish

log = logging.getLogger("saccade")

MakeWish = Callable[[LLTokenizer], Wish | None]
"""A wish that depends on the lexicon, as a forced tool call does: its tags may be tokens. Called in
the compiler's thread; may raise InvalidRequest. None: any text.
"""


class Compiler:
    """One thread, which reads the lexicon first. Callers wait in turn, the event loop never."""

    def __init__(self, tokenizer_json: str, vocab_size: int, ends: Sequence[int]) -> None:
        """`tokenizer_json`, `vocab_size`, `ends`: as in `core.lexicon.read_lexicon`, which holds
        the interpreter for half a second on a large vocabulary: build this before clients come.
        """
        self._thread = ThreadPoolExecutor(1, "saccade-grammar")
        self._lexicon = self._thread.submit(_read, tokenizer_json, vocab_size, ends)
        self._vocab_size = vocab_size
        self._grammars: Grammars | None = None

    async def compile(
        self, wish: Wish | MakeWish, thinks_until: str | None = None
    ) -> Grammar | None:
        """The grammar of a wish; None where it turns out to allow any text. `thinks_until`: as in
        `Grammars.compile`.

        Raises InvalidRequest whose `param` names the place.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._compile, wish, thinks_until
        )

    def _compile(self, wish: Wish | MakeWish, thinks_until: str | None) -> Grammar | None:
        lexicon = self._lexicon.result()  # this thread has read it before anything else
        if lexicon is None:
            raise InvalidRequest(
                "this model's tokenizer cannot be read as one of bytes, so that no grammar can be "
                "kept to: ask for the form in the prompt",
                wish.param if isinstance(wish, Wish) else None,
                "unsupported_parameter",
            )
        if self._grammars is None:
            self._grammars = Grammars(lexicon, self._vocab_size)
        made = wish if isinstance(wish, Wish) else wish(lexicon)
        return None if made is None else self._grammars.compile(made, thinks_until)


def _read(tokenizer_json: str, vocab_size: int, ends: Sequence[int]) -> LLTokenizer | None:
    try:
        return read_lexicon(tokenizer_json, vocab_size, ends)
    except Exception as error:  # the library raises plain ones, and the model serves without
        log.warning("no structured outputs: %s", str(error)[:300])
        return None
