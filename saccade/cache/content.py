"""A sequence's content as caches see it: tokens, and the places of images' rows.

Owns the edge key of the prefix cache. Knows nothing of pages or of who computes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from saccade.core.types import Image, ImageKey, Span

Stretch = tuple[int, int, ImageKey, int, int | None]
"""(position in the page, length, image, embedding row of the first, `Span.time`)."""
Partition = tuple[str, str]
"""(salt, fingerprint of the adapter): contents of different ones share no page."""
PageKey = tuple[tuple[int, ...], tuple[Stretch, ...]]
"""Token ids, and every stretch of image in the page."""

Twin = tuple[tuple[int, ...], Hashable]
"""The same, with stretches of tiles in place of those of images."""

_START = attrgetter("start")


def overlapping(spans: Sequence[Span], start: int, end: int) -> Iterator[Span]:
    """Yield the spans (ordered, disjoint) that share a token with `[start, end)`."""
    first = max(0, bisect_right(spans, start, key=_START) - 1)
    if first < len(spans) and spans[first].end <= start:
        first += 1
    for index in range(first, len(spans)):
        if spans[index].start >= end:
            return
        yield spans[index]


@dataclass(frozen=True, slots=True)
class Content:
    """A sequence's tokens (a list that grows with the answer), the prompt's spans, and the cache's
    partition: a salt and an adapter's fingerprint.
    """

    tokens: list[int]
    spans: tuple[Span, ...]
    images: tuple[Image, ...]
    salt: str = ""
    adapter: str = ""

    @property
    def partition(self) -> Partition:
        return self.salt, self.adapter

    def shown(self, start: int, end: int) -> tuple[Stretch, ...]:
        """Return every run of image tokens in `[start, end)`."""
        if not self.spans or start >= self.spans[-1].end:
            return ()
        stretches = []
        for span in overlapping(self.spans, start, end):
            low, high = max(start, span.start), min(end, span.end)
            stretches.append(
                (
                    low - start,
                    high - low,
                    self.images[span.image].key,
                    span.offset + low - span.start,
                    span.time,
                )
            )
        return tuple(stretches)

    def page(self, index: int, size: int) -> PageKey:
        """Return what decides page `index`'s keys and values, given equal earlier pages."""
        start = index * size
        return tuple(self.tokens[start : start + size]), self.shown(start, start + size)
