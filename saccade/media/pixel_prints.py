"""Measures how much of an image has changed, with pixel fingerprints: a hash for each square of the
resized pixels.

Fingerprints are computed only for images for which a client requested them. An image's key includes
its salt, so images of different tenants are never compared.
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
"""The side of a square, in pixels."""
MAX_PRINTS = 256
"""The maximum number of cached fingerprints. With the largest images, they take 30 MB."""
MAX_WATCHED = 4096
_KEYS = np.random.default_rng().integers(1 << 64, size=(SIDE, 3 * SIDE // 4), dtype=np.uint64)
"""Random for each process, so that a client cannot construct squares with colliding hashes."""


@dataclass(frozen=True, slots=True, eq=False)
class PixelPrint:
    """The hashes of the squares of one image."""

    canvas: tuple[int, int]  # (height, width) in pixels
    squares: npt.NDArray[np.uint64]  # row by row

    @classmethod
    def of(cls, pixels: memoryview, canvas: tuple[int, int]) -> PixelPrint:
        """Return the hashes of RGB pixels [height, width, 3].

        Hashes are multilinear (Carter and Wegman 1979): two different squares collide with a
        probability of 2^-32.
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
        """Return the fraction of squares that differ, or None if the sizes differ."""
        if self.canvas != before.canvas:
            return None
        return float(np.mean(self.squares != before.squares))


class PixelPrints:
    """Computes and stores the fingerprints of watched images when they are decoded."""

    def __init__(self) -> None:
        self._watched: LRUCache[ImageKey, None] = LRUCache(MAX_WATCHED)
        self._prints: LRUCache[ImageKey, PixelPrint] = LRUCache(MAX_PRINTS)

    def watch(self, keys: Iterable[ImageKey]) -> None:
        """Compute the fingerprints of these images when they are decoded."""
        for key in keys:
            self._watched[key] = None

    async def take(self, key: ImageKey, pixels: memoryview, canvas: tuple[int, int]) -> None:
        """Compute the fingerprint of a decoded image on a thread, if the image is watched."""
        if key in self._watched and key not in self._prints:
            self._prints[key] = await asyncio.to_thread(partial(PixelPrint.of, pixels, canvas))

    def changed(self, image: ImageKey, before: ImageKey) -> float | None:
        """Return the fraction of squares that differ between two images, or None if it is not
        known.
        """
        if image.digest == before.digest:
            return 0.0
        one, other = self._prints.get(image), self._prints.get(before)
        return None if one is None or other is None else one.changed(other)
