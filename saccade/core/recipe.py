"""The way from an image to the pixels of a vision encoder: operations that image workers carry out.

Data only: families write recipes (`FamilySpec.recipe`), and `media/formats/pixel_operations.py` has
what they name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from saccade.core.types import Grid, Size

Resample = str
"""The name of a function that resizes: one of `media/formats/pixel_operations.py`."""
BLACK = (0, 0, 0)
_FAMILY = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Box:
    """Pixels [top, bottom) x [left, right)."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def slices(self) -> tuple[slice, slice]:
        """Return the index of these pixels in [H, W, ...]."""
        return slice(self.top, self.bottom), slice(self.left, self.right)


@dataclass(frozen=True, slots=True)
class PageDrawing:
    """A document's page, drawn in (height, width) `size`. Its part in `box` is kept, or all."""

    size: Size
    box: Box | None = None

    @property
    def kept(self) -> Size:
        """Return (height, width) of what is kept."""
        box = self.box
        return self.size if box is None else (box.bottom - box.top, box.right - box.left)


@dataclass(frozen=True, slots=True)
class ImageTile:
    """A window of a resized image, placed on the canvas with its (top, left) corner at `at`."""

    window: Box
    at: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ImageView:
    """The image, or its part in `box`, resized to `size`.

    The view is placed on the canvas at (top, left) `at`, or is replaced by its `tiles`. A thumbnail
    is a second view.
    """

    size: Size
    box: Box | None = None
    at: tuple[int, int] = (0, 0)
    tiles: tuple[ImageTile, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnPixels:
    """One family's own operation: `draw` in the module that its `Family` names as `pixels`.

    It makes another image from an upright one. Raises ValueError for a name that no family can
    have.
    """

    family: str  # the family's name
    argument: str  # for `draw`, in the family's own words
    size: Size  # (height, width) for the image that it makes
    # source_bytes, other_bytes: the memory that it takes, for each source pixel and besides
    source_bytes: int = field(default=0, repr=False)
    other_bytes: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if not _FAMILY.fullmatch(self.family):
            raise ValueError(f"{self.family[:100]!r} is not a model family")


@dataclass(frozen=True, slots=True)
class PreprocessParams:
    """The operations that make pixels from an upright image with one size, in this order."""

    canvas: Size  # (height, width) for all pixels together, as in the arena
    # numbers by which the family recognises the result and derives tokens, positions and cost
    grid: Grid
    # parts of the image so far, resized by `resample` and placed; if empty, the image is the canvas
    # itself, made by the family
    views: tuple[ImageView, ...]
    # the canvas colour outside views; None if they cover it
    fill: tuple[int, int, int] | None = None
    resample: Resample = "bicubic"
    through: tuple[Size, ...] = ()  # sizes that the image is resized to in turn
    own: OwnPixels | None = None  # the family's own comes first

    def __repr__(self) -> str:
        """Return the text that names stored embeddings: another text makes all of them useless."""
        own = "" if self.own is None else f", own={self.own!r}"
        return (
            f"ImageRecipe(canvas={self.canvas!r}, grid={self.grid!r}, views={self.views!r}, "
            f"fill={self.fill!r}, resample={self.resample!r}, through={self.through!r}, "
            f"processor=None, tensors=(){own})"
        )

    @property
    def plain(self) -> bool:
        """Return True if the canvas is the whole image, resized."""
        return self.views == (ImageView(self.canvas),) and not (self.through or self.own)


def whole(size: Size, grid: Grid = (), resample: Resample = "bicubic") -> PreprocessParams:
    """Return a recipe that resizes the whole image to `size`."""
    return PreprocessParams(size, grid, (ImageView(size),), resample=resample)


def stacked(upper: Size, lower: Size, grid: Grid, resample: Resample) -> PreprocessParams:
    """Return a recipe that shows the whole image twice, in two sizes, one above the other.

    Beside the narrower of the two the canvas is black.
    """
    canvas = (upper[0] + lower[0], max(upper[1], lower[1]))
    views = (ImageView(upper), ImageView(lower, at=(upper[0], 0)))
    return PreprocessParams(canvas, grid, views, None if upper[1] == lower[1] else BLACK, resample)
