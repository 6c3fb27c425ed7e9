"""Computes the hashes of an image's tiles, and the part of the image that each tile covers.

Pixels are read from the arena after the image worker has finished writing them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from saccade.core.family import CanvasTile, Part
from saccade.core.recipe import Box, ImageView, PreprocessParams
from saccade.core.types import Image, Size
from saccade.media.content import PixelNames


def name_tiles(pixels: memoryview, image: Image, tiles: Sequence[CanvasTile]) -> PixelNames:
    """Return the hashes of an image's tiles, and a hash of the canvas that is derived from them.

    Tiles that the vision encoder cannot distinguish get the same hash.
    """
    canvas = np.frombuffer(pixels, np.uint8).reshape(*image.canvas, 3)
    names = []
    for tile in tiles:
        part = np.ascontiguousarray(canvas[tile.window.slices])
        names.append(blake3(repr((tile.grid, part.shape)).encode()).update(part.data).digest())
    whole = blake3(repr((image.grid, image.num_tokens)).encode()).update(b"".join(names))
    return PixelNames(whole.digest(), tuple(names))


def parts_of(recipe: PreprocessParams, tiles: Sequence[CanvasTile]) -> tuple[Part, ...]:
    """Return the part of the image that each tile covers.

    The result is empty if the preprocessing parameters do not determine it for every tile.
    """
    parts = []
    for tile in tiles:
        part = tile.part
        for view in recipe.views:
            part = part or _shown(view, tile.window)
        if part is None:
            return ()
        parts.append(part)
    return tuple(parts)


def _shown(view: ImageView, window: Box) -> Part | None:
    """Return the part of a view's image that a window of the canvas covers.

    Returns None if the window covers another view.
    """
    for tile in view.tiles:
        if tile.at == (window.top, window.left):
            return _fractions(tile.window, view.size)
    top, left = view.at
    inside = Box(window.top - top, window.left - left, window.bottom - top, window.right - left)
    touches = inside.bottom > 0 and inside.right > 0
    within = inside.top < view.size[0] and inside.left < view.size[1]
    return _fractions(inside, view.size) if touches and within and not view.tiles else None


def _fractions(box: Box, size: Size) -> Part:
    """Return the edges of a box as fractions of the image's height and width, from 0 to 1."""
    height, width = size
    edges = box.top / height, box.left / width, box.bottom / height, box.right / width
    top, left, bottom, right = (round(min(1.0, max(0.0, edge)), 4) for edge in edges)
    return top, left, bottom, right
