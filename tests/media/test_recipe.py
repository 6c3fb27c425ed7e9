"""Recipes of more than one resize: tiles, thumbnails, crops and padding are what resizing the whole
image, and cutting it up afterwards, would give.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from saccade.core.recipe import Box, ImageTile, ImageView, PreprocessParams, Resample, whole
from saccade.media.content import Probe, encode_array
from saccade.media.formats import decode as decoding
from saccade.media.formats.decode import decode_into
from saccade.media.formats.pixel_operations import Pixels
from saccade.media.workers.decode_queue import decoding_bytes
from tests.media.pictures import photo

SIDE = 32


def reference(pixels: Pixels, size: tuple[int, int], mode: Resample = "bicubic") -> Pixels:
    planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    planes = planes.contiguous(memory_format=torch.channels_last)
    found = torch.nn.functional.interpolate(
        planes, size, mode=mode, antialias=True, align_corners=False
    )
    return found[0].permute(1, 2, 0).numpy()


def tiled(rows: int, columns: int) -> PreprocessParams:
    """rows x columns tiles of the whole image, one below another, then a thumbnail."""
    tiles = tuple(
        ImageTile(
            Box(SIDE * row, SIDE * column, SIDE * (row + 1), SIDE * (column + 1)),
            (SIDE * (row * columns + column), 0),
        )
        for row in range(rows)
        for column in range(columns)
    )
    count = rows * columns
    cut = ImageView((SIDE * rows, SIDE * columns), tiles=tiles)
    thumbnail = ImageView((SIDE, SIDE), at=(SIDE * count, 0))
    return PreprocessParams((SIDE * (count + 1), SIDE), (rows, columns), (cut, thumbnail))


def drawn(pixels: Pixels, *recipes: PreprocessParams) -> list[Pixels]:
    canvases = [np.full((*recipe.canvas, 3), 7, np.uint8) for recipe in recipes]
    size = (pixels.shape[0], pixels.shape[1])
    decode_into(list(zip(canvases, recipes)), memoryview(encode_array(pixels)), size, 1)
    return canvases


@pytest.fixture(params=["at once", "by strips"])
def pixels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pixels:
    if request.param == "by strips":
        monkeypatch.setattr(decoding, "STRIP_PIXELS", 7 * 130)
    return photo(90, 130)


def test_tiles_and_thumbnail_are_cut_from_the_resized_image(pixels: Pixels) -> None:
    (canvas,) = drawn(pixels, tiled(2, 3))
    large = reference(pixels, (2 * SIDE, 3 * SIDE))
    for number, tile in enumerate(canvas.reshape(7, SIDE, SIDE, 3)[:6]):
        row, column = divmod(number, 3)
        expected = large[SIDE * row : SIDE * (row + 1), SIDE * column : SIDE * (column + 1)]
        np.testing.assert_array_equal(tile, expected)
    np.testing.assert_array_equal(canvas[6 * SIDE :], reference(pixels, (SIDE, SIDE)))


def test_a_crop_is_resized_by_itself_and_the_rest_is_filled(pixels: Pixels) -> None:
    box = Box(10, 20, 70, 121)
    recipe = PreprocessParams(
        (64, 64), (), (ImageView((40, 50), box, at=(3, 5)),), fill=(1, 2, 3), resample="bilinear"
    )
    (canvas,) = drawn(pixels, recipe)
    inside = reference(pixels[10:70, 20:121], (40, 50), "bilinear")
    np.testing.assert_array_equal(canvas[3:43, 5:55], inside)
    canvas[3:43, 5:55] = (1, 2, 3)
    assert (canvas == (1, 2, 3)).all()


def test_one_decode_serves_recipes_of_any_kind(pixels: Pixels) -> None:
    plain, cut = whole((48, 64)), tiled(1, 2)
    first, second = drawn(pixels, plain, cut)
    np.testing.assert_array_equal(first, reference(pixels, (48, 64)))
    np.testing.assert_array_equal(second, drawn(pixels, cut)[0])
    assert plain.plain and not cut.plain


def test_what_tiles_are_cut_from_counts_as_memory() -> None:
    probe = Probe("PNG", 90, 130, "RGB", 1, 1)
    plain = decoding_bytes(probe, 0, [whole((64, 96))])
    cut = decoding_bytes(probe, 0, [tiled(2, 3)])
    thumbnail = 3 * 90 * SIDE + 12 * SIDE * SIDE
    assert cut == plain + 3 * 64 * 96 + thumbnail
