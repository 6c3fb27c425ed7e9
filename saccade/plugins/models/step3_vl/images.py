"""The layout of a Step3-VL image: square crops, row by row, followed by the whole image resized to
a square.

The plan is exactly the published processor's. transformers' processor for Step-3.7 may plan one
crop more or less if rounding decides at SNAP_UP. A crop that extends beyond the image is padded as
in the published processor, whereas transformers' stretches it. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.core.family import CanvasTile, LargestImage, PixelBounds
from saccade.core.recipe import Box, OwnPixels, PreprocessParams
from saccade.core.types import Grid, Size
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import check_aspect, fingerprint
from saccade.families.kit.config_readers import (
    CLIP_MEAN,
    CLIP_STD,
    Colour,
    check_made_for,
    read_colours,
)
from saccade.plugins.models.step3_vl.config import REDUCTION, PerceptionConfig

MAX_ASPECT = 36
"""An image with this aspect ratio has as many crops as the largest square one."""
MAX_CROPS = MAX_ASPECT + 1
"""Since sizes are rounded to pixels, an image with that aspect ratio may have one more crop."""
WHOLE, CROP = (0, 0), (1,)
"""The grids of an image without crops, and of a single crop."""
SNAP_UP = 0.2
"""If an edge extends by more than this fraction into another crop, it gets that crop."""
PIXEL_BYTES = 4
"""Bytes per pixel in Pillow, and per color value in float32."""


@dataclass(frozen=True, slots=True)
class Sides:
    """The edges, in pixels, of a resized image (maximum), of the square for the whole image, and of
    a crop.
    """

    longest: int
    whole: int
    crop: int


@dataclass(frozen=True, slots=True)
class CropPlan:
    """Describes how an upright image is resized and cropped."""

    padded: Size  # the image's size, or the square that it is padded to
    resized: Size  # the padded image, scaled down to at most `Sides.longest`
    snapped: Size  # the image from which crops of `window` x `window` pixels are taken
    window: int  # window, rows and columns are 0 without crops
    rows: int  # of crops
    columns: int  # of crops


def plan_crops(size: Size, sides: Sides) -> CropPlan:
    """Plan how an image of this size is cropped. If `sides.crop` is 0, it is not cropped."""
    height, width = size
    if min(size) < 32 and not 1 / 4 <= width / height <= 4:
        height = width = max(size)
    padded = resized = height, width
    if max(padded) > sides.longest:
        scale = sides.longest / max(padded)
        resized = int(height * scale), int(width * scale)
    window = _window(max(resized), min(resized), sides) if sides.crop else 0
    if not window:
        return CropPlan(padded, resized, resized, 0, 0, 0)
    snapped = _snapped(resized[0], window), _snapped(resized[1], window)
    rows, columns = (max(1, edge // window) for edge in snapped)
    return CropPlan(padded, resized, snapped, window, rows, columns)


def _window(long: int, short: int, sides: Sides) -> int:
    """Return the edge of the crops in pixels, or 0 if there are no crops."""
    if long <= sides.whole:
        return short if long / short > 1.5 else 0
    return min(short, sides.crop) if long / short > 4 else sides.crop


def _snapped(edge: int, window: int) -> int:
    """Return the multiple of `window` to which an edge is resized. An edge shorter than `window` is
    returned unchanged.
    """
    ratio = edge / window
    if ratio < 1:
        return edge
    return window * (int(ratio) + (ratio - edge // window > SNAP_UP))


@dataclass(frozen=True, slots=True)
class CropRules:
    """Implements `ImageLayout` and `TileLayout`.

    A patch is `patch` x `patch` pixels, and a token is REDUCTION x REDUCTION patches.

    An image's grid is its rows and columns of crops, both 0 if there are none. A single crop has
    the grid `CROP`. On the canvas, the crops are arranged in this grid. The whole image is below
    the first crop of the last row, and the rest of that row is empty.
    """

    sides: Sides
    mean: Colour
    std: Colour
    patch: int

    @property
    def pixel_bounds(self) -> PixelBounds:
        crop = self.sides.crop**2
        return PixelBounds(crop, crop, MAX_CROPS * crop)

    @property
    def largest_image(self) -> LargestImage:
        sides, grid = self.sides, (1, MAX_CROPS)
        most = MAX_CROPS * sides.crop * (sides.crop + sides.whole)
        return LargestImage(most, self.num_tokens(grid))

    @property
    def sample(self) -> PreprocessParams:
        return self._recipe((self.sides.whole,) * 2, self.sides)

    @property
    def patch_unit(self) -> int:
        return REDUCTION**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        """Return the preprocessing parameters with the longest edge at which all crops are within
        the bounds.
        """
        size = height, width
        check_aspect(height, width, MAX_ASPECT)
        whole, crop = self.sides.whole, self.sides.crop
        for longest in range(self.sides.longest, whole, -crop):
            sides = Sides(longest, whole, crop)
            plan = plan_crops(size, sides)
            if plan.rows * plan.columns * crop**2 <= bounds.max_pixels:
                return self._recipe(size, sides)
        return self._recipe(size, Sides(self.sides.longest, whole, 0))

    def _recipe(self, size: Size, sides: Sides) -> PreprocessParams:
        plan = plan_crops(size, sides)
        grid = plan.rows, plan.columns
        canvas = canvas_size(grid, self.sides)
        steps = (plan.padded, plan.resized, plan.snapped, (sides.longest, sides.whole))
        own = OwnPixels(
            "step3_vl",
            f"{sides.longest} {sides.whole} {sides.crop}",
            canvas,
            source_bytes=PIXEL_BYTES,
            other_bytes=PIXEL_BYTES * sum(height * width for height, width in steps),
        )
        return PreprocessParams(canvas, grid, (), own=own)

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        return fingerprint(family, self.patch, self.mean, self.std, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of a canvas of this size in pixels."""
        crops, odd = divmod(height - self.sides.whole, self.sides.crop)
        assert not odd
        return (crops, width // self.sides.crop) if crops else (0, 0)

    def tiles(self, grid: Grid) -> tuple[CanvasTile, ...]:
        rows, columns = grid
        if not rows:
            return ()
        crop, whole, counts = self.sides.crop, self.sides.whole, self.view_tokens(grid)
        found, first = [], 0
        for row in range(rows):
            for column in range(columns):
                box = Box(crop * row, crop * column, crop * (row + 1), crop * (column + 1))
                part = row / rows, column / columns, (row + 1) / rows, (column + 1) / columns
                found.append(CanvasTile(box, CROP, (range(first, first + counts[0]),), part))
                first += counts[0]
        box = Box(crop * rows, 0, crop * rows + whole, whole)
        return (*found, CanvasTile(box, WHOLE, (range(first, first + counts[-1]),), (0, 0, 1, 1)))

    def num_tokens(self, grid: Grid) -> int:
        return sum(self.view_tokens(grid))

    def view_tokens(self, grid: Grid) -> list[int]:
        """Return the number of tokens of each crop, then of the whole image."""
        return [patches // REDUCTION**2 for patches in self.view_patches(grid)]

    def num_patches(self, grid: Grid) -> int:
        return sum(self.view_patches(grid))

    def view_patches(self, grid: Grid) -> list[int]:
        """Return the number of patches of each crop, then of the whole image."""
        crop, whole = ((side // self.patch) ** 2 for side in (self.sides.crop, self.sides.whole))
        if grid == CROP:
            return [crop]
        return [*[crop] * (grid[0] * grid[1]), whole]


def canvas_size(grid: Grid, sides: Sides) -> Size:
    """Return the size of the canvas: rows of crops above the whole image."""
    rows, columns = grid
    return rows * sides.crop + sides.whole, max(columns * sides.crop, sides.whole)


def read_images(processor: Section, vision: PerceptionConfig) -> CropRules:
    """Read the rules for crops from the image processor's config. Raises CheckpointError.

    The Hub's checkpoint has no such file. Its values are constants in the processor's code.
    """
    check_made_for(processor.section("size"), height=vision.side, width=vision.side)
    crop = processor.count("patch_size", default=504)
    longest = processor.count("max_image_size", default=3024)
    if crop > vision.side or crop % vision.unit:
        raise CheckpointError(
            f"{processor.where}: patch_size must be a multiple of {vision.unit} pixels and at most "
            f"{vision.side}, not {crop}"
        )
    if not vision.side <= longest <= MAX_ASPECT**0.5 * crop:
        raise CheckpointError(
            f"{processor.where}: max_image_size must be from {vision.side} to "
            f"{int(MAX_ASPECT**0.5 * crop)}, not {longest}"
        )
    mean, std = read_colours(processor, CLIP_MEAN, CLIP_STD)
    return CropRules(Sides(longest, vision.side, crop), mean, std, vision.patch)
