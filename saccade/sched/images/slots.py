"""The pixel arena's bytes by image: the allocator, and pixels kept for another use.

Owns every byte of the arena. Knows only keys and sizes, and leaves the need for images and the
writing to others.

A slot is in use from `reserve` or `reuse` until `keep_pixels` or `free`. Kept pixels are a cache.
They serve a later need for the image, and make room when room is needed.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.core.plan import PixelSlot
from saccade.core.types import Image, ImageKey

ALIGNMENT_BYTES = 4096
"""Slots start on a page of memory, so that no two images share one."""
GIVEN_SHARE = 4
"""An embedding that would take more than one part in so many of the arena is not asked of another
server: its pixels take a fifth or less of that.
"""


@dataclass(frozen=True, slots=True)
class Notices:
    """News for the front."""

    want: tuple[tuple[ImageKey, PixelSlot], ...] = ()  # images to decode, each into its slot
    unwanted: tuple[ImageKey, ...] = ()  # images being decoded that are needed no more
    aliases: tuple[tuple[ImageKey, Image], ...] = ()  # images with another's pixels


class Allocator:
    """`size` bytes, first fit."""

    def __init__(self, size: int) -> None:
        self._holes = [(0, size)]  # (offset, length) by offset; no two touch
        self._taken: dict[int, int] = {}  # offset -> length

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` fresh bytes, or None while every hole is too small."""
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
        """The offsets returned by `allocate` and still in use."""
        return set(self._taken)

    @property
    def holes(self) -> Sequence[tuple[int, int]]:
        """The free ranges: (offset, bytes)."""
        return tuple(self._holes)

    def free(self, offset: int) -> None:
        """Free an offset from `allocate`."""
        insort(self._holes, (offset, self._taken.pop(offset)))
        merged: list[tuple[int, int]] = []
        for start, length in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == start:
                start, length = merged[-1][0], merged.pop()[1] + length
            merged.append((start, length))
        self._holes = merged


class PixelSlots:
    """The arena's book, by image."""

    def __init__(self, size: int, given_bytes: int = 0) -> None:
        """Start with an empty arena. `given_bytes`: as in `SchedulerLimits`."""
        self.size = aligned(size)
        self._given_bytes = given_bytes
        self.bytes_in_use = 0
        """Bytes of slots in use; kept pixels do not count."""
        self._memory = Allocator(self.size)
        self._kept: dict[ImageKey, PixelSlot] = {}  # least recently used first

    def __contains__(self, key: ImageKey) -> bool:
        """Return True if the pixels of `key` are kept from an earlier use."""
        return key in self._kept

    def fits(self, image: Image) -> bool:
        """Return True if an image has room in an otherwise empty arena."""
        return aligned(math.prod(image.canvas) * 3) <= self.size

    def reserve(self, image: Image) -> PixelSlot | None:
        """Reserve a slot for writing, or return None if the slots in use leave too little.

        Kept pixels make room.
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
        """Return the slot with the kept pixels of `key`, now in use, or None."""
        slot = self._kept.pop(key, None)
        if slot is not None:
            self.bytes_in_use += slot.nbytes
        return slot

    def keep_pixels(self, key: ImageKey, slot: PixelSlot) -> None:
        """Keep a slot's pixels for `key`, now that the slot is out of use."""
        assert key not in self._kept
        self.bytes_in_use -= slot.nbytes
        self._kept[key] = slot

    def drop_kept(self, nbytes: int | None = None) -> int:
        """Drop kept pixels, the least recently used first, until `nbytes` are free of them.

        None means all. Returns the bytes.
        """
        freed = 0
        while self._kept and (nbytes is None or freed < nbytes):
            slot = self._kept.pop(next(iter(self._kept)))
            self._memory.free(slot.offset)
            freed += slot.nbytes
        return freed

    @property
    def holes(self) -> Sequence[tuple[int, int]]:
        """The ranges without pixels, in use or kept: (offset, bytes)."""
        return self._memory.holes

    def free(self, slot: PixelSlot) -> None:
        """Free a slot and drop its content."""
        self.bytes_in_use -= slot.nbytes
        self._memory.free(slot.offset)


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to whole pages of memory."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
