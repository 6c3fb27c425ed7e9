"""The way from an image to the pixels of a vision tower: resized, cropped, cut into tiles, padded.
Data only: families write recipes (`FamilySpec.recipe`), image workers carry them out
(`media/decode.py`).

Knows nothing of formats, patches or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.pixel_tensors import PixelTensor
from saccade.core.types import Grid, Size

Resample = Literal["bicubic", "bilinear", "lanczos", "pillow_bicubic", "pillow_lanczos"]
"""Those of torch, with antialias, and two of Pillow: their values differ by 1 here and there."""
BY_PILLOW: frozenset[Resample] = frozenset({"pillow_bicubic", "pillow_lanczos"})


@dataclass(frozen=True, slots=True)
class Box:
    """Pixels [top, bottom) x [left, right)."""

    top: int
    left: int
    bottom: int
    right: int


@dataclass(frozen=True, slots=True)
class ImageTile:
    """The pixels of a resized image in `window`, placed on the canvas from (top, left) `at` on."""

    window: Box
    at: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ImageView:
    """The image, or its part in `box`, resized to `size`.

    The view lies on the canvas from (top, left) `at` on, or is replaced by its `tiles`. A thumbnail
    is a second view.
    """

    size: Size
    box: Box | None = None
    at: tuple[int, int] = (0, 0)
    tiles: tuple[ImageTile, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnProcessor:
    """A checkpoint's own processor of images. folder: the checkpoint's. choices: a JSON object of
    the fields in which the processor is to differ from its files.
    """

    folder: str
    choices: str = "{}"


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """The pixels made of an upright image of one size.

    canvas: (height, width) of all pixels together, as in the arena. grid: numbers by which the
    family recognises the result and derives tokens, positions and cost. fill: colour of the canvas
    outside of views; None if views cover the canvas. through: sizes that the whole image is resized
    to in turn, before views are made of the last. processor: makes the pixels, as `tensors`, in
    place of views; None: the views do.
    """

    canvas: Size
    grid: Grid
    views: tuple[ImageView, ...]
    fill: tuple[int, int, int] | None = None
    resample: Resample = "bicubic"
    through: tuple[Size, ...] = ()
    processor: OwnProcessor | None = None
    tensors: tuple[PixelTensor, ...] = ()

    @property
    def plain(self) -> bool:
        """True if the canvas is the whole image, resized."""
        return self.views == (ImageView(self.canvas),) and not self.through


def whole(size: Size, grid: Grid = ()) -> ImageRecipe:
    """The whole image, resized to `size`."""
    return ImageRecipe(size, grid, (ImageView(size),))
