"""Tiles as the front end knows them: what is named alike, and what a tile shows of its image."""

from __future__ import annotations

import numpy as np
import pytest

from saccade.core.family import CanvasTile
from saccade.core.recipe import Box
from saccade.core.types import Image, ImageKey
from saccade.media.tiles import name_tiles, parts_of
from saccade_bench.screens.layouts import FAMILIES

LOOK = ImageKey(bytes(32), bytes(16))
WHOLE = (0.0, 0.0, 1.0, 1.0)


def names(canvas: np.ndarray, *tiles: CanvasTile) -> tuple[bytes, ...]:
    image = Image(LOOK, (1,), 4, 16, (canvas.shape[0], canvas.shape[1]))
    return name_tiles(memoryview(canvas.tobytes()), image, tiles).tiles


def test_tiles_share_a_name_if_the_tower_cannot_tell_them_apart() -> None:
    canvas = np.zeros((8, 8, 3), np.uint8)
    canvas[7, 7, 2] = 1
    square = CanvasTile(Box(0, 0, 4, 4), (1,), (range(4),))
    same = CanvasTile(Box(0, 4, 4, 8), (1,), (range(4, 8),))
    differs = CanvasTile(Box(4, 4, 8, 8), (1,), (range(8, 12),))
    shape = CanvasTile(Box(0, 0, 2, 8), (1,), (range(12, 16),))
    kind = CanvasTile(Box(0, 0, 4, 4), (2,), (range(16, 20),))
    first, second, *others = names(canvas, square, same, differs, shape, kind)
    assert first == second
    assert len({first, *others}) == 4


@pytest.mark.parametrize("size", [(1080, 1920), (1440, 900), (700, 701)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_show_their_image_without_gaps(family: str, size: tuple[int, int]) -> None:
    layout = FAMILIES[family].layout
    recipe = layout.recipe(*size, layout.pixel_bounds)
    tiles = layout.tiles(recipe.grid)
    parts = parts_of(recipe, tiles)
    assert len(parts) == len(tiles)
    assert not tiles or WHOLE in parts
    shown = [part for part in parts if part != WHOLE]
    area = sum((bottom - top) * (right - left) for top, left, bottom, right in shown)
    assert len(shown) < 2 or area == pytest.approx(1.0, abs=0.01)
    rows = [row for tile in tiles for run in tile.rows for row in run]
    assert len(rows) == len(set(rows))
    assert max(rows, default=0) < layout.num_tokens(recipe.grid)
