"""Image preprocessing as data: the operations that produce the encoder's input pixels from an
image.

Families choose the parameters (`FamilySpec.recipe`). `media/formats/pixel_operations.py` implements
the operations.
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
    """A rectangle of pixels: rows [top, bottom), columns [left, right)."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def slices(self) -> tuple[slice, slice]:
        """The slices that select these pixels from an array [H, W, ...]."""
        return slice(self.top, self.bottom), slice(self.left, self.right)


@dataclass(frozen=True, slots=True)
class PageDrawing:
    """Render a document page at `size` (height, width), then crop it to `box` if that is set."""

    size: Size
    box: Box | None = None

    @property
    def kept(self) -> Size:
        """The (height, width) of the image after the crop."""
        box = self.box
        return self.size if box is None else (box.bottom - box.top, box.right - box.left)


@dataclass(frozen=True, slots=True)
class ImageTile:
    """A window of a resized image. It is copied to the output with its (top, left) corner at
    `at`.
    """

    window: Box
    at: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ImageView:
    """Resize the image, or the region `box` of it, to `size`, and copy the result to the output.

    Its (top, left) corner is at `at` in the output. If `tiles` is not empty, only these windows are
    copied. A thumbnail is a second view of the same image.
    """

    size: Size
    box: Box | None = None
    at: tuple[int, int] = (0, 0)
    tiles: tuple[ImageTile, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnPixels:
    """A family's own operation, applied to the image after EXIF rotation and before all other
    operations.

    It is the function `draw` in the module `Family.pixels`. Raises ValueError if `family` is not a
    valid family name.
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
    """The operations that produce the encoder's input pixels (the canvas) from an image of one
    size, in order.
    """

    canvas: Size  # (height, width) of the result, as stored in the arena
    grid: Grid  # from which the family derives tokens, positions and cost
    # regions of the image, resized with `resample` and copied to the canvas; if empty, `own` makes
    # the canvas itself
    views: tuple[ImageView, ...]
    fill: tuple[int, int, int] | None = None  # color outside the views; None: they cover the output
    resample: Resample = "bicubic"
    through: tuple[Size, ...] = ()  # the image is first resized to these sizes, one after another
    own: OwnPixels | None = None  # a family's own operation, which is applied before the others

    def __repr__(self) -> str:
        """Return a string that is part of the cache key of stored embeddings. Any change to its
        format invalidates all of them.
        """
        own = "" if self.own is None else f", own={self.own!r}"
        return (
            f"ImageRecipe(canvas={self.canvas!r}, grid={self.grid!r}, views={self.views!r}, "
            f"fill={self.fill!r}, resample={self.resample!r}, through={self.through!r}, "
            f"processor=None, tensors=(){own})"
        )

    @property
    def plain(self) -> bool:
        """True if the output is the entire image, resized once."""
        return self.views == (ImageView(self.canvas),) and not (self.through or self.own)


def whole(size: Size, grid: Grid = (), resample: Resample = "bicubic") -> PreprocessParams:
    """Return parameters that resize the entire image to `size`."""
    return PreprocessParams(size, grid, (ImageView(size),), resample=resample)


def stacked(upper: Size, lower: Size, grid: Grid, resample: Resample) -> PreprocessParams:
    """Return parameters that put the image on the output twice: resized to `upper`, and below that
    resized to `lower`.

    The area to the right of the narrower one is black.
    """
    canvas = (upper[0] + lower[0], max(upper[1], lower[1]))
    views = (ImageView(upper), ImageView(lower, at=(upper[0], 0)))
    return PreprocessParams(canvas, grid, views, None if upper[1] == lower[1] else BLACK, resample)
