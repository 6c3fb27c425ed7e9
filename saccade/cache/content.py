"""A sequence's content as caches see it: tokens, and the places of images' rows.

Owns the edge key of the prefix cache, and the names of KV pages for places that outlive its trie.
A name has 256 bits and is chained from the root. It differs wherever anything differs that a page's
keys and values depend on.

    root (identity of the server's pages, salt, adapter) ◀── first page ◀── second page ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from struct import pack

from saccade.core.types import Image, ImageKey, Span

ImageSegment = tuple[int, int, ImageKey, int, int | None]
"""(position in the page, length, image, embedding row of the first, `Span.time`)."""
Partition = tuple[str, str]
"""(salt, fingerprint of the adapter): contents of different ones share no page."""
PageKey = tuple[tuple[int, ...], tuple[ImageSegment, ...]]
"""Token ids, and every stretch of image in the page."""

TileKey = tuple[tuple[int, ...], Hashable]
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

    def shown(self, start: int, end: int) -> tuple[ImageSegment, ...]:
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


NAME_BYTES = 32


def _text(value: bytes) -> bytes:
    return pack("<Q", len(value)) + value


def root_name(identity: bytes, salt: str, adapter: str = "") -> bytes:
    """Return the name of the empty prefix.

    identity: see `core.store.PageIdentity`. adapter: its fingerprint.
    """
    facts = b"root" + _text(identity) + _text(salt.encode()) + _text(adapter.encode())
    return blake2b(facts, digest_size=NAME_BYTES).digest()


def page_name(parent: bytes, key: PageKey) -> bytes:
    """Return the name of the page with content `key` after the page `parent`."""
    tokens, shown = key
    name = blake2b(b"page" + parent, digest_size=NAME_BYTES)
    name.update(pack(f"<{1 + len(tokens)}q", len(tokens), *tokens))
    for position, length, image, row, time in shown:
        name.update(pack("<3qB", position, length, row, time is not None))
        name.update(pack("<q", time or 0))
        name.update(_text(image.digest) + _text(image.settings) + _text(image.salt.encode()))
    return name.digest()


def state_name(page: bytes) -> bytes:
    """Return the name of a sequence's state after the page, for models that keep one."""
    return blake2b(b"state" + page, digest_size=NAME_BYTES).digest()
