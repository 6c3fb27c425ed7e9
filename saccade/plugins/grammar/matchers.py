"""The grammar state of sequences: the tokens allowed next, and forced tokens.

The engine process has a matcher for each sequence, and the mask for its next token. Matchers are
copied from a prototype.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from saccade.core.errors import InternalError, InvalidRequest, RequestError
from saccade.ipc.memory import allocated_bytes
from saccade.plugins.grammar.vocabulary import begin_match, fill_mask, mask_words

MAX_KEPT_BYTES = 128 << 20
"""Maximum memory of cached prototypes, as measured by malloc statistics."""
MIN_KEPT_BYTES = 16 << 10
"""Minimum bytes that each cached prototype counts as."""
GROWTH_BYTES = 200 << 20
"""Estimated memory growth in bytes of a prototype per second spent on slow masks. All of its copies
share its lexer, which caches states.
"""
MASK_SECONDS = 5.0
TOKEN_SECONDS = 2e-3
"""Maximum CPU time in seconds for the grammar of one answer: a fixed part, and a part for each
token.
"""
SLOW_SECONDS = 5e-4
"""The time in seconds above which a mask is slow. Most masks take 10 to 50 us. After a slow mask, a
sequence's masks are computed in another thread.
"""


@dataclass(slots=True)
class Prototype:
    """A compiled grammar and its first mask. `match` is only ever copied."""

    match: LLMatcher
    nbytes: int  # memory when it was compiled
    slow_seconds: float = 0.0  # CPU time that slow masks of all copies have taken since

    @property
    def kept_bytes(self) -> int:
        """Return the estimated memory in bytes of the prototype and the state that its copies
        share.
        """
        return self.nbytes + int(self.slow_seconds * GROWTH_BYTES)


class Matcher:
    """The state of one sequence in its grammar.

    This class handles stop tokens itself, because the library's rollback miscounts them.
    """

    def __init__(
        self,
        prototype: Prototype,
        match: LLMatcher,
        lexicon: LLTokenizer,
        ends: frozenset[int],
        words: int,
    ) -> None:
        """Use `match`, a copy of the prototype's.

        words: the number of 32-bit words in a mask.
        """
        self._prototype = prototype
        self._match = match
        self._lexicon = lexicon
        self._ends = ends
        self._words = words
        self._length = 0
        self._ended = False

    @property
    def length(self) -> int:
        """The number of accepted tokens, including a stop token."""
        return self._length

    @property
    def ended(self) -> bool:
        """Whether a stop token was accepted."""
        return self._ended

    @property
    def may_end(self) -> bool:
        """Whether the answer so far is complete."""
        return self._ended or self._match.is_accepting()

    @property
    def must_end(self) -> bool:
        """Whether the answer is complete, and the grammar allows no more text.

        If so, the sequence needs no further step, not even for a stop token.
        """
        return self._ended or (self._match.is_stopped() and not self._match.is_error())

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by all `tokens`, or raise without changing the position.

        Raises InvalidRequest if the grammar has become too complex, and InternalError if a token is
        not allowed. Both fail only this request.
        """
        if not tokens:
            return
        last = tokens[-1] in self._ends
        body = list(tokens[:-1] if last else tokens)
        taken = self._match.try_consume_tokens(body)
        if self._match.is_error():
            raise self._too_complex()
        whole = taken == len(body) and (not last or self._match.is_accepting())
        if self._ended or not whole:
            if taken:
                self._match.rollback(taken)
            raise InternalError(
                f"token {self._length + taken + 1} of the answer "
                f"({tokens[min(taken, len(body))]}) is not allowed by the grammar"
            )
        self._ended = last
        self._length += len(tokens)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Count the leading draft `tokens` that the grammar allows. The state does not change."""
        if self._ended:
            return 0
        for at, token in enumerate(tokens):
            if token in self._ends:
                length = self._match.validate_tokens(list(tokens[:at]))
                return length + 1 if length == at and self._ends_after(tokens[:at]) else length
        return self._match.validate_tokens(list(tokens))

    def fill(self, row: np.ndarray) -> None:
        """Write the mask for the next token to `row` [W] uint32.

        After the end, only stop tokens are allowed. Raises InvalidRequest if the grammar has become
        too complex.
        """
        assert row.shape == (self._words,)
        if self._ended:
            row[:] = 0
            for token in self._ends:
                row[token // 32] |= np.uint32(1 << token % 32)
            return
        fill_mask(self._lexicon, self._match, row)
        if self._match.is_error():
            raise self._too_complex()
        if not self.may_end:  # a client's grammar may contain a stop token in the middle
            for token in self._ends:
                row[token // 32] &= ~np.uint32(1 << token % 32)

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that the grammar forces next. They can be accepted without sampling.

        They are tokenized as the tokenizer would, and do not include a stop token.
        """
        if self._ended:
            return ()
        tokens = tuple(takewhile(lambda t: t not in self._ends, self._match.compute_ff_tokens()))
        return tokens[: self._match.validate_tokens(list(tokens))] if tokens else ()

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        assert 0 <= count <= self._length
        self._length -= count
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            done = self._match.rollback(count)
            assert done, self._match.get_error()

    def charge(self, seconds: float) -> None:
        """Add the time of a slow mask to the estimated memory growth of the prototype."""
        self._prototype.slow_seconds += seconds

    def clone(self) -> Matcher:
        """Return a matcher with the same state."""
        match = self._match.deep_copy()
        other = Matcher(self._prototype, match, self._lexicon, self._ends, self._words)
        other._length, other._ended = self._length, self._ended
        return other

    def _ends_after(self, tokens: Sequence[int]) -> bool:
        ahead = self._match.deep_copy()
        return ahead.consume_tokens(list(tokens)) and ahead.is_accepting()

    def _too_complex(self) -> InvalidRequest:
        return InvalidRequest(
            f"the grammar cannot be followed after {self._length} tokens: "
            f"{self._match.get_error().splitlines()[0]}; simplify its patterns",
            code="grammar_too_complex",
        )


class MatcherState:
    """A sequence's matcher, and the mask for its next token.

    The mask is computed as soon as the previous token is known: at once or, if masks are slow, in
    another thread. Async scheduling plans a step before the previous token is known only while
    masks are quick.

    Forced tokens are tokenized as the tokenizer would. They are accepted all at once (`jump`), or
    sampled one by one (`step`) with masks that allow one token. The answer is the same either way.
    """

    def __init__(
        self,
        matcher: Matcher,
        words: int,
        threads: Executor,
        wake: Callable[[], object],
        slow_seconds: float = SLOW_SECONDS,
    ) -> None:
        """Compute the first mask, which is the slowest.

        words: the number of 32-bit words in a mask.
        wake: called from another thread when a slow mask is ready.
        """
        self._matcher = matcher
        self._row = np.zeros(words, np.uint32)
        self._threads = threads
        self._wake = wake
        self._slow_seconds = slow_seconds
        self._slow = slow_seconds <= 0
        self._spent = 0.0
        self._fault: RequestError | None = None
        self._filling: Future[None] | None = None
        self._forced: deque[int] = deque()  # to be sampled one by one
        self._only: int | None = None  # the only token that the next `mask` allows, if any
        self._slow_ahead = False
        self._fill()

    @property
    def must_end(self) -> bool:
        """Whether the answer is complete, as in `Matcher.must_end`."""
        return self._matcher.must_end

    @property
    def ready(self) -> bool:
        """Whether the mask for the next token has been computed."""
        return self._filling is None or self._filling.done()

    @property
    def quick(self) -> bool:
        """Whether masks are computed immediately, rather than in another thread."""
        return not self._slow

    @property
    def foresees(self) -> bool:
        """True if `ahead` may be called: it requires that masks after draft tokens are quick."""
        return not (self._slow or self._slow_ahead)

    @property
    def anything(self) -> bytes:
        """A mask that allows every token."""
        return b"\xff" * self._row.nbytes

    def accept(self, token: int) -> None:
        """Advance by a token sampled with the mask. Raises InvalidRequest if the grammar has become
        too complex, and InternalError if the token is not allowed.
        """
        if self._filling is not None:  # masks between accepted draft tokens are not waited for
            self._filling.result()
            self._filling = None
        if self._fault is not None:
            raise self._fault
        if self._forced and token != self._forced.popleft():
            raise InternalError(f"token {token} was drawn where another was forced")
        with self._timed():
            self._matcher.accept((token,))

    def jump(self, planned: bool) -> tuple[int, ...]:
        """Accept all forced tokens, and return them.

        planned: whether a plan in flight samples the first one.

        Raises InvalidRequest if the grammar has become too complex, and InternalError if a token is
        not allowed.
        """
        with self._timed():
            tokens = self._matcher.forced()
            self._matcher.accept(tokens)
        if tokens:
            self._only = tokens[0] if planned else None
        return tokens

    def step(self) -> None:
        """Switch to sampling forced tokens one by one."""
        if not self._forced:
            self._forced.extend(self._matcher.forced())

    def go_on(self, planned: bool) -> None:
        """Compute the mask for the next token, unless the token is forced.

        planned: whether a plan in flight needs the mask.
        """
        if self._forced:
            return
        if planned or not self._slow:
            before = self._spent
            self._fill()
            self._slow |= self._spent - before > self._slow_seconds
        else:
            self._filling = self._threads.submit(self._fill)
            self._filling.add_done_callback(lambda _: self._wake())

    def mask(self) -> bytes:
        """Return the mask for the next token. Blocks unless `ready`.

        Raises InvalidRequest if the grammar has become too complex.
        """
        if self._filling is not None:
            self._filling.result()
            self._filling = None
        only = self._forced[0] if self._forced else self._only
        self._only = None
        if only is not None:
            return self.lone(only)
        if self._fault is not None:
            raise self._fault
        return self._row.tobytes()

    def lone(self, token: int) -> bytes:
        """Return a mask that allows only this token."""
        row = np.zeros_like(self._row)
        row[token // 32] = np.uint32(1 << token % 32)
        return row.tobytes()

    def count_allowed(self, draft_tokens: Sequence[int]) -> int:
        """Count the leading draft tokens that the grammar allows, as in `Matcher.count_allowed`."""
        return self._matcher.count_allowed(draft_tokens)

    def ahead(self, draft_tokens: Sequence[int], jumps: bool) -> list[bytes]:
        """Return the mask after each draft token, up to the first one that is not allowed.

        The state does not change, and the CPU time is not charged to the answer.

        jumps: whether forced tokens are accepted all at once. If several tokens are forced, only
        the draft tokens before them get masks.
        """
        masks: list[bytes] = []
        begin, matcher, row = time.thread_time(), self._matcher.clone(), np.zeros_like(self._row)
        forced = deque(self._forced)
        with suppress(RequestError):  # the error is raised again if the answer gets that far
            for draft_token in draft_tokens:
                jumped = jumps and bool(forced)
                if forced and draft_token != forced.popleft():
                    break
                if not matcher.count_allowed((draft_token,)):
                    break
                matcher.accept((draft_token,))
                if matcher.must_end:
                    break
                if not forced and not jumped:
                    forced.extend(matcher.forced())
                if not forced:
                    matcher.fill(row)
                    if not row.any():
                        break
                masks.append(self.lone(forced[0]) if forced else row.tobytes())
                if jumps and len(forced) > 1:
                    break
        took = time.thread_time() - begin
        if took > SLOW_SECONDS * (1 + len(masks)):
            self._slow_ahead = True
            self._matcher.charge(took)
        return masks

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the CPU time that the body takes to the time spent on this answer. Wall-clock time
        would include the work of other processes.
        """
        begin = time.thread_time()
        try:
            yield
        finally:
            took = time.thread_time() - begin
            self._spent += took
            if took > SLOW_SECONDS:
                self._matcher.charge(took)

    def _fill(self) -> None:
        length = self._matcher.length
        if self._spent > MASK_SECONDS + TOKEN_SECONDS * length:
            self._fault = InvalidRequest(
                f"the grammar is too slow to follow: {self._spent:.1f} s of CPU time for {length} "
                f"tokens; the limit is {MASK_SECONDS:g} s and {TOKEN_SECONDS * 1e3:g} ms a token: "
                "simplify it (fewer ways to write the same text)",
                code="grammar_too_complex",
            )
            return
        try:
            with self._timed():
                self._matcher.fill(self._row)
        except RequestError as error:
            self._fault = error
            return
        except Exception as error:  # llguidance has no exception types; fail this request
            self._fault = InternalError(f"a mask of the grammar could not be computed: {error}")
            return
        if not self._row.any():
            self._fault = InvalidRequest(
                f"after {self._matcher.length} tokens, the grammar allows no token of this model: "
                "change the grammar",
                code="grammar_too_complex",
            )


class Matchers:
    """Creates matchers, and caches the prototypes of the most recently used grammars."""

    def __init__(
        self,
        lexicon: LLTokenizer,
        vocab_size: int,
        ends: Sequence[int],
        most: int = 256,
        most_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        """Create an empty cache.

        most: the maximum number of prototypes.
        most_bytes: the maximum memory of all prototypes. The most recent one is cached even if it
        is larger.
        """
        self._most_bytes = most_bytes
        self._lexicon = lexicon
        self._words = mask_words(vocab_size)
        self._row = np.zeros(self._words, np.uint32)
        self._ends = frozenset(ends)
        self._most = most
        self._prototypes: OrderedDict[str, Prototype] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """An estimate of the memory of all cached prototypes."""
        return sum(each.kept_bytes for each in self._prototypes.values())

    @property
    def words(self) -> int:
        """The number of 32-bit words in a mask."""
        return self._words

    def new_matcher(self, grammar: str) -> Matcher:
        """Return a new matcher for the grammar `Grammar.text`.

        Call this from one thread at a time. Raises InvalidRequest if the grammar does not compile,
        or its first mask fails, although the front end has checked both. Such a grammar is not
        cached.
        """
        prototype = self._prototypes.get(grammar)
        if prototype is None:
            prototype = self._prototypes[grammar] = self._compile(grammar)
        self._prototypes.move_to_end(grammar)
        while len(self._prototypes) > 1 and (
            len(self._prototypes) > self._most or self.nbytes > self._most_bytes
        ):
            self._prototypes.popitem(last=False)
        match = prototype.match.deep_copy()
        return Matcher(prototype, match, self._lexicon, self._ends, self._words)

    def _compile(self, grammar: str) -> Prototype:
        before = allocated_bytes()
        match = begin_match(self._lexicon, grammar)
        if not match.is_error():
            fill_mask(self._lexicon, match, self._row)
        if match.is_error():
            raise InvalidRequest(
                f"the grammar does not compile: {match.get_error().splitlines()[0]}",
                code="grammar_too_complex",
            )
        taken = allocated_bytes() - before  # inexact: other threads may allocate or free memory
        return Prototype(match, max(MIN_KEPT_BYTES, len(grammar), taken))
