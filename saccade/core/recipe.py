"""How an image becomes the pixels that a vision tower takes: resized, cropped, cut into tiles,
padded. Data only: families write recipes (`FamilySpec.recipe`), image workers carry them out
(`media/decode.py`).

Knows nothing of formats, patches or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.types import Grid, Size

Resample = Literal["bicubic", "bilinear"]


@dataclass(frozen=True, slots=True)
class Box:
    """Pixels [top, bottom) x [left, right)."""

    top: int
    left: int
    bottom: int
    right: int


@dataclass(frozen=True, slots=True)
class ImageTile:
    """Of a resized image the pixels in `window`, which lie on the canvas from (top, left) `at`
    on.
    """

    window: Box
    at: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ImageView:
    """The image, or what of it lies in `box`, resized to `size`.

    It lies on the canvas from (top, left) `at` on; where there are `tiles`, these lie there in its
    place. A thumbnail is another view.
    """

    size: Size
    box: Box | None = None
    at: tuple[int, int] = (0, 0)
    tiles: tuple[ImageTile, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """What is made of an upright image of one size.

    canvas: (height, width) of all pixels together, in which they lie in the arena.
    grid: numbers by which the family knows the result again: what an image's tokens, positions and
    cost follow from.
    fill: colour of the canvas where no view lies; None where views cover it.
    """

    canvas: Size
    grid: Grid
    views: tuple[ImageView, ...]
    fill: tuple[int, int, int] | None = None
    resample: Resample = "bicubic"

    @property
    def plain(self) -> bool:
        """Whether the whole image, resized, is the canvas."""
        return self.views == (ImageView(self.canvas),)


def whole(size: Size, grid: Grid = ()) -> ImageRecipe:
    """The whole image, resized to `size`."""
    return ImageRecipe(size, grid, (ImageView(size),))
