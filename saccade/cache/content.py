"""What the caches compare in a sequence: its tokens, and the embedding row used at each position.

Defines the keys of the prefix cache's edges, and the 256-bit hashes of KV pages. Caches that
outlive the trie, for example on disk, identify pages by these hashes. The hash of a page includes
that of the page before it, and everything else that its keys and values depend on.

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
"""A run of image tokens in a page: (position in the page, length, image, embedding row of the first
token, `Span.time`).
"""
Partition = tuple[str, str]
"""(salt, fingerprint of the adapter). Sequences of different partitions never share a page."""
PageKey = tuple[tuple[int, ...], tuple[ImageSegment, ...]]
"""(token ids of a page, its image segments)."""

TileKey = tuple[tuple[int, ...], Hashable]
"""Like `PageKey`, but with segments of tiles, which refer to a tile's hash instead of an image's
key.
"""

_START = attrgetter("start")


def overlapping(spans: Sequence[Span], start: int, end: int) -> Iterator[Span]:
    """Yield the spans that overlap `[start, end)`. `spans` must be sorted and disjoint."""
    first = max(0, bisect_right(spans, start, key=_START) - 1)
    if first < len(spans) and spans[first].end <= start:
        first += 1
    for index in range(first, len(spans)):
        if spans[index].start >= end:
            return
        yield spans[index]


@dataclass(frozen=True, slots=True)
class Content:
    """What the caches compare in a sequence: tokens, the spans and images of its prompt, and its
    partition.

    The list of tokens grows while tokens are generated.
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
        """Return the segments of image tokens in `[start, end)`, with positions relative to
        `start`.
        """
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
        """Return the key of page `index`.

        Two pages with equal keys have equal KV if all pages before them are equal.
        """
        start = index * size
        return tuple(self.tokens[start : start + size]), self.shown(start, start + size)


NAME_BYTES = 32
PAGE_FORMAT = "saccade-page-1"
"""Change this whenever the bytes of a page, or their meaning, change in a way that no field of
`PageIdentity` reflects.
"""


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """Everything that the keys and values in a page depend on, other than the prompt."""

    weights: str  # digest of the checkpoint's files, including its configuration
    computed: str  # how they are computed: device, dtype, quantization and family options
    kept: str  # the dtype and scales of the cache
    layout: str  # each layer's caches on one rank, and the number of ranks
    page_size: int
    adapter: str = ""  # reserved; always empty
    release: str = ""  # Saccade's version

    def digest(self) -> bytes:
        """Return a 16-byte hash of all fields and the page format."""
        return blake2b(repr((PAGE_FORMAT, self)).encode(), digest_size=16).digest()


def _text(value: bytes) -> bytes:
    return pack("<Q", len(value)) + value


def root_name(identity: bytes, salt: str, adapter: str = "") -> bytes:
    """Return the hash of the empty prefix, the root of all page hashes in a partition.

    identity: the result of `PageIdentity.digest`.
    adapter: the fingerprint of the adapter, or "".
    """
    facts = b"root" + _text(identity) + _text(salt.encode()) + _text(adapter.encode())
    return blake2b(facts, digest_size=NAME_BYTES).digest()


def page_name(parent: bytes, key: PageKey) -> bytes:
    """Return the hash of the page with content `key` after the page with hash `parent`."""
    tokens, shown = key
    name = blake2b(b"page" + parent, digest_size=NAME_BYTES)
    name.update(pack(f"<{1 + len(tokens)}q", len(tokens), *tokens))
    for position, length, image, row, time in shown:
        name.update(pack("<3qB", position, length, row, time is not None))
        name.update(pack("<q", time or 0))
        name.update(_text(image.digest) + _text(image.settings) + _text(image.salt.encode()))
    return name.digest()


def state_name(page: bytes) -> bytes:
    """Return the hash of the recurrent state after a page, for models with a state per sequence."""
    return blake2b(b"state" + page, digest_size=NAME_BYTES).digest()
