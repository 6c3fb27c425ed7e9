"""Allocates slots for images in the pixel arena (shared memory), and caches pixels for a later use.

The front end and the workers write and read the slots. This module manages only offsets and sizes.
A slot is in use from `reserve` or `reuse` until `keep_pixels` or `free`. Kept pixels are a cache:
they are evicted when space is needed.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.core.plan import PixelSlot
from saccade.core.types import Image, ImageKey

ALIGNMENT_BYTES = 4096
"""Slots are aligned to memory pages, so that two images never share one."""
GIVEN_SHARE = 4
"""An embedding larger than 1/GIVEN_SHARE of the arena is not requested from the encoder server. Its
pixels are requested instead, which take at most a fifth of the embedding's size.
"""


@dataclass(frozen=True, slots=True)
class Notices:
    """Updates for the front end: images to decode, images no longer needed, and new aliases."""

    want: tuple[tuple[ImageKey, PixelSlot], ...] = ()  # images to decode, each into its slot
    unwanted: tuple[ImageKey, ...] = ()  # images no longer needed: cancel their decoding
    aliases: tuple[tuple[ImageKey, Image], ...] = ()  # new aliases, as in `ipc.messages.Same`


class Allocator:
    """Allocates ranges of `size` bytes, each in the first hole that is large enough (first fit)."""

    def __init__(self, size: int) -> None:
        self._holes = [(0, size)]  # (offset, length) by offset; no two touch
        self._taken: dict[int, int] = {}  # offset -> length

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` newly allocated bytes, or None if no hole is large
        enough.
        """
        wanted = aligned(nbytes)
        for index, (offset, length) in enumerate(self._holes):
            if length >= wanted:
                left = [(offset + wanted, length - wanted)] if length > wanted else []
                self._holes[index : index + 1] = left
                self._taken[offset] = wanted
                return offset
        return None

    @property
    def taken(self) -> set[int]:
        """The offsets of all allocated ranges."""
        return set(self._taken)

    @property
    def holes(self) -> Sequence[tuple[int, int]]:
        """The free ranges: (offset, bytes)."""
        return tuple(self._holes)

    def free(self, offset: int) -> None:
        """Free the range that `allocate` returned `offset` for."""
        insort(self._holes, (offset, self._taken.pop(offset)))
        merged: list[tuple[int, int]] = []
        for start, length in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == start:
                start, length = merged[-1][0], merged.pop()[1] + length
            merged.append((start, length))
        self._holes = merged


class PixelSlots:
    """Allocates and frees the arena's slots, and caches the pixels of released ones."""

    def __init__(self, size: int, given_bytes: int = 0) -> None:
        """Start with an empty arena.

        size: the size of the arena in bytes.
        given_bytes: as in `SchedulerLimits`.
        """
        self.size = aligned(size)
        self._given_bytes = given_bytes
        self.bytes_in_use = 0
        """Bytes of slots in use, without kept pixels."""
        self._memory = Allocator(self.size)
        self._kept: dict[ImageKey, PixelSlot] = {}  # least recently used first

    def __contains__(self, key: ImageKey) -> bool:
        """Return True if the pixels of `key` are cached from an earlier use."""
        return key in self._kept

    def fits(self, image: Image) -> bool:
        """Return True if the image fits in an empty arena."""
        return aligned(math.prod(image.canvas) * 3) <= self.size

    def reserve(self, image: Image) -> PixelSlot | None:
        """Return a new slot that the front end can write to, or None if there is too little space.

        Evicts cached pixels if necessary.
        """
        height, width = image.canvas
        embedding_bytes = image.num_tokens * self._given_bytes
        if embedding_bytes > self.size // GIVEN_SHARE:
            embedding_bytes = 0
        while (offset := self._memory.allocate(max(3 * height * width, embedding_bytes))) is None:
            if not self._kept:
                return None
            self._memory.free(self._kept.pop(next(iter(self._kept))).offset)
        slot = PixelSlot(offset, height, width, embedding_bytes)
        self.bytes_in_use += slot.nbytes
        return slot

    def reuse(self, key: ImageKey) -> PixelSlot | None:
        """Return the slot with the cached pixels of `key`, or None. The slot is in use from now
        on.
        """
        slot = self._kept.pop(key, None)
        if slot is not None:
            self.bytes_in_use += slot.nbytes
        return slot

    def keep_pixels(self, key: ImageKey, slot: PixelSlot) -> None:
        """Release a slot, but cache its pixels under `key` until space is needed."""
        assert key not in self._kept
        self.bytes_in_use -= slot.nbytes
        self._kept[key] = slot

    def drop_kept(self, nbytes: int | None = None) -> int:
        """Evict cached pixels, the least recently used first, until `nbytes` bytes are freed.

        None evicts all. Returns the number of bytes freed.
        """
        freed = 0
        while self._kept and (nbytes is None or freed < nbytes):
            slot = self._kept.pop(next(iter(self._kept)))
            self._memory.free(slot.offset)
            freed += slot.nbytes
        return freed

    @property
    def holes(self) -> Sequence[tuple[int, int]]:
        """The free ranges, which contain no pixels in use and no cached ones: (offset, bytes)."""
        return self._memory.holes

    def free(self, slot: PixelSlot) -> None:
        """Free a slot and discard its content."""
        self.bytes_in_use -= slot.nbytes
        self._memory.free(slot.offset)


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
