"""What differs between two images: a hash for each square of their resized pixels.

Owns the prints of images that a client asks about, and their bounds. An image is named with its
salt, so nothing is compared across tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from saccade.core.types import ImageKey

SIDE = 16
"""Pixels of a square's side."""
MAX_PRINTS = 256
"""The most prints that are kept. Those of the largest images take 30 MB."""
MAX_WATCHED = 4096
_KEYS = np.random.default_rng().integers(1 << 64, size=(SIDE, 3 * SIDE // 4), dtype=np.uint64)
"""Drawn anew by each process, so that nobody can draw a square with the hash of another."""


@dataclass(frozen=True, slots=True, eq=False)
class PixelPrint:
    """One image's squares, row by row. canvas: height and width in pixels."""

    canvas: tuple[int, int]
    squares: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, pixels: memoryview, canvas: tuple[int, int]) -> PixelPrint:
        """Hash RGB pixels [height, width, 3].

        A square's hash is multilinear (Carter and Wegman 1979): two that differ have the same one
        with a probability of 2^-32.
        """
        height, width = canvas
        image = np.frombuffer(pixels, np.uint8).reshape(height, 3 * width)
        rows, columns = -(-height // SIDE), -(-width // SIDE)
        more = (0, rows * SIDE - height), (0, 3 * (columns * SIDE - width))
        if any(after for _, after in more):
            image = np.pad(image, more)
        words = image.view(np.uint32).reshape(rows, SIDE, columns, -1)
        return cls(canvas, np.einsum("rych,yh->rc", words, _KEYS, dtype=np.uint64).ravel())

    def changed(self, before: PixelPrint) -> float | None:
        """Return the share of squares that differ, or None between two sizes."""
        if self.canvas != before.canvas:
            return None
        return float(np.mean(self.squares != before.squares))


class PixelPrints:
    """The prints of watched images, made when these are decoded."""

    def __init__(self) -> None:
        self._watched: LRUCache[ImageKey, None] = LRUCache(MAX_WATCHED)
        self._prints: LRUCache[ImageKey, PixelPrint] = LRUCache(MAX_PRINTS)

    def watch(self, keys: Iterable[ImageKey]) -> None:
        """Make prints of these images from now on."""
        for key in keys:
            self._watched[key] = None

    async def take(self, key: ImageKey, pixels: memoryview, canvas: tuple[int, int]) -> None:
        """Make a watched image's print, beside the event loop."""
        if key in self._watched and key not in self._prints:
            self._prints[key] = await asyncio.to_thread(partial(PixelPrint.of, pixels, canvas))

    def changed(self, image: ImageKey, before: ImageKey) -> float | None:
        """Return the share of squares that differ, or None where it is unknown."""
        if image.digest == before.digest:
            return 0.0
        one, other = self._prints.get(image), self._prints.get(before)
        return None if one is None or other is None else one.changed(other)
