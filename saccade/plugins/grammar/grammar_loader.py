"""Prepares the grammars of requests in threads, while the engine's loop continues.

One thread reads the lexicon and compiles grammars, as the front end has done before. Other threads
compute slow masks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from saccade.core.errors import InternalError, InvalidRequest, RequestError
from saccade.core.types import Delta, Request
from saccade.sched.grammar_state import GrammarState

if TYPE_CHECKING:
    from saccade.plugins.grammar.matchers import Matchers

log = logging.getLogger("saccade")

SLOW_THREADS = 2
"""The number of threads that compute masks for sequences whose masks are slow."""


class GrammarLoader:
    """Prepares the grammar states of requests. `wake` is called when `take_ready` has something to
    return.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        ends: Sequence[int],
        wake: Callable[[], object],
    ) -> None:
        """Start reading the lexicon.

        wake: called from any thread when a grammar is ready. The other arguments are the same as in
        `vocabulary.read_lexicon`.
        """
        self._wake = wake
        self._beginner = ThreadPoolExecutor(1, "saccade-grammar")
        self._matchers = self._beginner.submit(_read, tokenizer_json, vocab_size, ends)
        self._slow = ThreadPoolExecutor(SLOW_THREADS, "saccade-mask")
        self._waiting: dict[str, tuple[Request, Future[GrammarState]]] = {}

    @property
    def waiting(self) -> bool:
        """True if `take_ready` has not yet returned every request."""
        return bool(self._waiting)

    def prepare(self, request: Request) -> None:
        """Start to compile a request's grammar in another thread. `take_ready` returns the request
        when its grammar is ready.
        """
        future = self._beginner.submit(self._begin, request.grammar)
        self._waiting[request.id] = (request, future)
        future.add_done_callback(lambda _: self._wake())

    def drop(self, id: str) -> bool:
        """Cancel the preparation of a request's grammar. Returns True if the request was still
        waiting.
        """
        waited = self._waiting.pop(id, None)
        if waited is not None:
            waited[1].cancel()
        return waited is not None

    def take_ready(self) -> list[tuple[Request, GrammarState | RequestError]]:
        """Remove and return the requests whose grammar states are ready or have failed."""
        found: list[tuple[Request, GrammarState | RequestError]] = []
        for id, (request, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[id]
            try:
                found.append((request, future.result()))
            except RequestError as error:
                found.append((request, error))
            except Exception as error:  # a failure must not affect other requests
                log.exception("a grammar could not be begun")
                found.append((request, InternalError(f"the grammar could not be started: {error}")))
        return found

    def fail_all(self, error: str) -> list[Delta]:
        """Fail all waiting requests with this error, and return their final deltas."""
        ended = [Delta(id, finish="error", error=error) for id in self._waiting]
        self._waiting.clear()
        return ended

    def _begin(self, grammar: str) -> GrammarState:
        from saccade.plugins.grammar.matchers import MatcherState

        matchers = self._matchers.result()  # the thread's first job, so it is done
        if matchers is None:
            raise InvalidRequest("this model's tokenizer is not byte-level")
        matcher = matchers.new_matcher(grammar)
        return MatcherState(matcher, matchers.words, self._slow, self._wake)


def _read(tokenizer_json: str, vocab_size: int, ends: Sequence[int]) -> Matchers | None:
    from saccade.plugins.grammar.matchers import Matchers
    from saccade.plugins.grammar.vocabulary import read_lexicon

    try:
        lexicon = read_lexicon(tokenizer_json, vocab_size, ends)
    except Exception:  # llguidance has no exception types; the front end has reported the error
        return None
    return Matchers(lexicon, vocab_size, ends)
