"""Image preprocessing as data: the operations by which image workers make the encoder's pixels.

Families choose the parameters (`FamilySpec.recipe`), and `media/formats/pixel_operations.py`
implements the operations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from saccade.core.types import Grid, Size

Resample = str
"""The name of a resize function in `media/formats/pixel_operations.py`."""
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
        """The index of these pixels in an array [H, W, ...]."""
        return slice(self.top, self.bottom), slice(self.left, self.right)


@dataclass(frozen=True, slots=True)
class PageDrawing:
    """A document page to render at `size` (height, width), and the `box` to crop, if any."""

    size: Size
    box: Box | None = None

    @property
    def kept(self) -> Size:
        """The (height, width) of the result."""
        box = self.box
        return self.size if box is None else (box.bottom - box.top, box.right - box.left)


@dataclass(frozen=True, slots=True)
class ImageTile:
    """A window of a resized image, copied to the canvas with its (top, left) corner at `at`."""

    window: Box
    at: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ImageView:
    """The image, or its region in `box`, resized to `size`.

    The result is copied to the canvas with its (top, left) corner at `at`. If it has `tiles`, only
    these windows are copied instead. A thumbnail is a second view.
    """

    size: Size
    box: Box | None = None
    at: tuple[int, int] = (0, 0)
    tiles: tuple[ImageTile, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnPixels:
    """A family's own operation, applied to the upright image first: the function `draw` in the
    module `Family.pixels`.

    Raises ValueError if `family` is not a possible name.
    """

    family: str
    argument: str  # passed to `draw`, in a format that the family defines
    size: Size  # (height, width) of the image that it returns
    source_bytes: int = field(default=0, repr=False)  # memory that it uses per source pixel
    other_bytes: int = field(default=0, repr=False)  # other memory that it uses

    def __post_init__(self) -> None:
        if not _FAMILY.fullmatch(self.family):
            raise ValueError(f"{self.family[:100]!r} is not a model family")


@dataclass(frozen=True, slots=True)
class PreprocessParams:
    """The operations that make the encoder's pixels from an upright image of one size, in order."""

    canvas: Size  # (height, width) of the result, as stored in the arena
    grid: Grid  # from which the family derives tokens, positions and cost
    # regions of the image, resized by `resample` and copied to the canvas; if empty, `own` makes
    # the canvas itself
    views: tuple[ImageView, ...]
    fill: tuple[int, int, int] | None = None  # color outside the views; None: they cover it
    resample: Resample = "bicubic"
    through: tuple[Size, ...] = ()  # sizes to which the image is resized one after another first
    own: OwnPixels | None = None  # a family's own operation, which is applied before the others

    def __repr__(self) -> str:
        """Part of the cache key of stored embeddings: any change to it invalidates all of them."""
        own = "" if self.own is None else f", own={self.own!r}"
        return (
            f"ImageRecipe(canvas={self.canvas!r}, grid={self.grid!r}, views={self.views!r}, "
            f"fill={self.fill!r}, resample={self.resample!r}, through={self.through!r}, "
            f"processor=None, tensors=(){own})"
        )

    @property
    def plain(self) -> bool:
        """True if the canvas is the entire image, resized once."""
        return self.views == (ImageView(self.canvas),) and not (self.through or self.own)


def whole(size: Size, grid: Grid = (), resample: Resample = "bicubic") -> PreprocessParams:
    """Return parameters that resize the entire image to `size`."""
    return PreprocessParams(size, grid, (ImageView(size),), resample=resample)


def stacked(upper: Size, lower: Size, grid: Grid, resample: Resample) -> PreprocessParams:
    """Return parameters that put the image on the canvas twice: resized to `upper`, and below that
    resized to `lower`.

    The canvas is black to the right of the narrower one.
    """
    canvas = (upper[0] + lower[0], max(upper[1], lower[1]))
    views = (ImageView(upper), ImageView(lower, at=(upper[0], 0)))
    return PreprocessParams(canvas, grid, views, None if upper[1] == lower[1] else BLACK, resample)
