"""Image files of many sizes and kinds, and their pixels as a family asks for them."""

from __future__ import annotations

from functools import cache

import numpy as np
import PIL.Image

from saccade.core.errors import ImageError
from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.media.formats.decode import decode_into
from saccade.media.formats.header import probe
from saccade_bench.lab.qwen import grids
from tests.fixtures.tiny import Reference
from tests.media.pictures import decoded, encode, noise, photo, with_orientation

SIZES = [
    *((300, 150), (150, 300), (97, 131), (200, 201), (112, 168)),
    *((1, 1), (3, 2), (56, 56), (57, 55), (20, 31)),
    *((700, 1900), (2100, 800), (1200, 1201)),
    *((900, 4), (5, 1100), (2000, 90), (64, 640)),
]


def transparent(size: tuple[int, int], seed: int) -> bytes:
    image = PIL.Image.fromarray(photo(*size, seed=seed)).convert("RGBA")
    image.putalpha(PIL.Image.fromarray(noise(*size, seed=seed)[..., 0]))
    return encode(image, "PNG")


@cache
def files() -> list[bytes]:
    return [
        *(encode(photo(*size, seed=i), ("PNG", "JPEG")[i % 2]) for i, size in enumerate(SIZES)),
        *(transparent(size, i) for i, size in enumerate(SIZES[:6])),
        *(with_orientation(photo(90, 200), turn, "JPEG") for turn in range(1, 9)),
        *(with_orientation(photo(330, 64), turn, "PNG") for turn in range(1, 9)),
        encode(PIL.Image.fromarray(photo(120, 70)).convert("L"), "PNG"),
    ]


def canvas_of(spec: FamilySpec, data: bytes) -> tuple[np.ndarray, Grid]:
    """Decode a file as image workers do, to its canvas and its grid."""
    header = probe(data, max_pixels=10**8)
    recipe = spec.recipe(*header.upright, spec.pixel_bounds)
    canvas = np.full((*recipe.canvas, 3), 7, np.uint8)
    decode_into([(canvas, recipe)], memoryview(data), header.upright, header.orientation)
    return canvas, recipe.grid


def check_pixels(spec: FamilySpec, theirs: Reference, count: int | None = None) -> set[Grid]:
    """Compare files' pixels with the reference's, and return the grids that were met. Of all files,
    two are lines, which some families refuse.
    """
    met, refused = set(), 0
    for data in files()[:count]:
        try:
            canvas, grid = canvas_of(spec, data)
        except ImageError:
            refused += 1
            continue
        wanted = theirs.resize(decoded(data))
        np.testing.assert_array_equal(canvas, wanted)
        assert grids(spec, [wanted]) == [grid]
        met.add(grid)
    assert refused <= 2
    return met
