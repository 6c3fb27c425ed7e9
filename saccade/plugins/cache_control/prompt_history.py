"""Explains misses in the prefix cache by comparing a prompt with the client's recent prompts.

Only prompts with a cache option are stored, as tokens and image keys. The limit on bytes is fair to
clients with few prompts. The history contains all computed tokens, even if their KV pages have been
evicted.

Prompts are compared only within one client and one salt, so a client learns only about its own
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from saccade.cache.content import Partition
from saccade.core.types import CacheMiss, CacheMissReason, ImageKey, Request

MAX_BYTES = 32 << 20
MAX_PROMPTS = 16
"""Maximum prompts of one client. An explanation compares all of them, at about 20 us each."""
PROMPT_BYTES, SPAN_BYTES = 1024, 256
"""The bytes that a prompt and an image span count as in the limit, in addition to 4 per token."""

Shown = tuple[int, int, ImageKey, int]
"""(first token, length, image, row of the image at the first token)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Remembered:
    tokens: npt.NDArray[np.int32]
    shown: tuple[Shown, ...]
    partition: Partition
    family: str
    kept: int  # the number of tokens that breakpoints pin
    until: float  # when that pin ends
    flushes: int  # the number of cache flushes before it was computed

    @property
    def nbytes(self) -> int:
        return PROMPT_BYTES + self.tokens.nbytes + SPAN_BYTES * len(self.shown)


@dataclass(frozen=True, slots=True)
class _Likeness:
    """An earlier prompt with a common prefix of `length` tokens.

    resized: whether the prefix ends at an image that both prompts have in different sizes.
    """

    length: int
    resized: bool
    prompt: _Remembered


class PromptHistory:
    """Stores recent prompts (`add_prompt`), and explains misses (`explain`)."""

    def __init__(self, page_size: int, clock: Callable[[], float]) -> None:
        self.nbytes = 0
        self._page_size = page_size
        self._clock = clock
        self._flushes = 0
        self._of: dict[str, list[_Remembered]] = {}  # by client, oldest first
        self._bytes: dict[str, int] = {}

    def flushed(self) -> None:
        """Record that the prefix cache was flushed."""
        self._flushes += 1

    def add_prompt(self, request: Request, kept: int) -> None:
        """Add a computed prompt.

        kept: the number of leading tokens that breakpoints have pinned.
        """
        caching, size = request.caching, self._page_size
        seconds = max((s for at, s in caching.breakpoints if at // size * size <= kept), default=0)
        prompt = _Remembered(
            np.array(request.tokens, np.int32),
            _shown(request),
            (request.cache_salt, request.adapter.fingerprint),
            caching.family,
            kept,
            self._clock() + seconds,
            self._flushes,
        )
        self._forget(request.client, lambda other: _same(other, prompt))
        if prompt.nbytes > MAX_BYTES:
            return
        self._of.setdefault(request.client, []).append(prompt)
        self._count(request.client, prompt.nbytes)
        while len(self._of[request.client]) > MAX_PROMPTS:
            self._drop_oldest(request.client)
        while self.nbytes > MAX_BYTES:
            self._drop_oldest(max(self._bytes, key=lambda client: self._bytes[client]))

    def explain(self, request: Request, cached: int) -> CacheMiss | None:
        """Return the reason why only `cached` tokens of the prompt were found in the prefix cache.

        Returns None if no earlier prompt has a longer common prefix.
        """
        size, length = self._page_size, len(request.tokens)
        most = (length - 1) // size * size

        def miss(reason: CacheMissReason, token: int = cached) -> CacheMiss:
            return CacheMiss(reason, token, length - token)

        if not most:
            return miss("too_short")
        if cached >= most:
            return None
        own = self._likest(request)
        if own is not None:
            earlier = own.prompt
            if cached < min(own.length // size * size, most):
                if earlier.flushes != self._flushes:
                    return miss("flushed")
                over = cached < earlier.kept and earlier.until <= self._clock()
                return miss("expired" if over else "evicted")
            if own.length == len(earlier.tokens):
                return None
            return miss("other_settings" if own.resized else "prompt_changed", own.length)
        return miss("never_seen")

    def _likest(self, request: Request) -> _Likeness | None:
        """Return the earlier prompt with the longest common prefix, or None. Of several, the latest
        is returned.

        Only prompts with the same salt are compared. Prompts that differ within the first page are
        unrelated, unless the client gives them the same name.
        """
        tokens, shown = np.array(request.tokens, np.int32), _shown(request)
        sought = request.cache_salt, request.adapter.fingerprint
        best: _Likeness | None = None
        for prompt in reversed(self._of.get(request.client, ())):
            if prompt.partition != sought or prompt.family != request.caching.family:
                continue
            likeness = _compare(tokens, shown, prompt)
            named = bool(prompt.family)
            if (named or likeness.length >= self._page_size) and (
                best is None or likeness.length > best.length
            ):
                best = likeness
        return best

    def _drop_oldest(self, client: str) -> None:
        oldest = self._of[client][0]
        self._forget(client, lambda prompt: prompt is oldest)

    def _forget(self, client: str, gone: Callable[[_Remembered], bool]) -> None:
        prompts = self._of.pop(client, [])
        left = [prompt for prompt in prompts if not gone(prompt)]
        if left:
            self._of[client] = left
        self._count(client, _total(left) - _total(prompts))

    def _count(self, client: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._bytes[client] = self._bytes.get(client, 0) + nbytes
        if not self._bytes[client]:
            del self._bytes[client]


def _total(prompts: Iterable[_Remembered]) -> int:
    return sum(prompt.nbytes for prompt in prompts)


def _shown(request: Request) -> tuple[Shown, ...]:
    return tuple(
        (span.start, span.length, request.images[span.image].key, span.offset)
        for span in request.spans
    )


def _same(one: _Remembered, other: _Remembered) -> bool:
    return (
        (one.partition, one.family, one.shown) == (other.partition, other.family, other.shown)
        and len(one.tokens) == len(other.tokens)
        and bool((one.tokens == other.tokens).all())
    )


def _compare(
    tokens: npt.NDArray[np.int32], shown: tuple[Shown, ...], prompt: _Remembered
) -> _Likeness:
    """Return the common prefix of two prompts. Salts of images are not compared, because they
    belong to the prompts.
    """
    shorter = min(len(tokens), len(prompt.tokens))
    differ = np.flatnonzero(tokens[:shorter] != prompt.tokens[:shorter])
    length = int(differ[0]) if len(differ) else shorter
    for one, other in zip(shown, prompt.shown):
        first = min(one[0], other[0])
        if first >= length:
            break
        digests = one[2].digest, other[2].digest
        if (one[:2], one[3], digests[0]) != (other[:2], other[3], digests[1]) or (
            one[2].settings != other[2].settings
        ):
            resized = one[0] == other[0] and digests[0] == digests[1]
            return _Likeness(first, resized and one[2].settings != other[2].settings, prompt)
    return _Likeness(length, False, prompt)
