"""The layout of a MiniCPM-V image: it keeps its aspect ratio. A large one is also divided into a
grid of slices.

Sizes are exactly the same as in transformers' image processor. Does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.core.family import CanvasTile, LargestImage, PixelBounds
from saccade.core.recipe import Box, ImageView, PreprocessParams, Resample, stacked
from saccade.core.types import Grid, Size
from saccade.families.checkpoint import Checkpoint, Section
from saccade.families.kit.base_spec import (
    MAX_ASPECT,
    check_aspect,
    fingerprint,
    stacked_bounds,
)
from saccade.families.kit.config_readers import HALF, read_colours, read_resample
from saccade.nn.shapes import Colours
from saccade.plugins.models.minicpm.config import MergingTower, Sibling, read_mode

MARGIN = 1.25
"""Factor by which a slice's aspect ratio may exceed the ideal one, since edges are whole pixels."""
UPSIZES = ("always", "never")
"""Values of `small_image_upsize`: whether to enlarge an image that has fewer pixels than a
slice.
"""
RESAMPLES: dict[int, Resample] = {1: "pillow_lanczos", 3: "pillow_bicubic"}
"""Supported resampling filters, which follow Pillow's implementation, by their number in Pillow."""
MAX_SCALE = 4096
MAX_SLICES = 100
"""Maximum slices of an image. No published checkpoint has more than nine, of 448 x 448 pixels."""


@dataclass(frozen=True, slots=True)
class SliceRules:
    """Implements `ImageLayout` and `TileLayout`.

    An image with more than `scale` x `scale` pixels is encoded as a whole, at about that many
    pixels, and in up to `most` slices of about that many pixels each. A token is merge x merge
    patches of `patch` x `patch` pixels.

    An image's grid is the whole image's rows and columns of tokens, and with slices also their rows
    and columns, and the rows and columns of tokens of each slice. On the canvas, the grid of slices
    is below the whole image. The space to the right of the narrower one is empty.
    """

    scale: int
    most: int
    colours: Colours
    resample: Resample
    patch: int
    merge: int
    upsize: str = "always"

    @property
    def unit(self) -> int:
        """The edge, in pixels, of the square that becomes one token."""
        return self.patch * self.merge

    @property
    def pixel_bounds(self) -> PixelBounds:
        """The minimum and maximum pixels, in multiples of a slice, which counts as `scale` x
        `scale` pixels in any shape.
        """
        area = self.scale**2
        return PixelBounds(area, area, self.most * area)

    @property
    def largest_image(self) -> LargestImage:
        """Upper bounds on the pixels and tokens of an image."""
        tokens = most_of_all(self.scale, self.unit, self.most, MAX_ASPECT)
        return stacked_bounds(tokens, self.unit)

    @property
    def sample(self) -> PreprocessParams:
        return self._recipe((self.scale,) * 2, (0, 0))

    @property
    def patch_unit(self) -> int:
        return self.merge**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        check_aspect(height, width, MAX_ASPECT)
        area = self.scale**2
        most = min(self.most, max(1, bounds.max_pixels // area))
        least = min(most, -(-bounds.min_pixels // area))
        return self._recipe((height, width), slice_grid((height, width), self.scale, least, most))

    def _recipe(self, size: Size, slices: tuple[int, int]) -> PreprocessParams:
        scale, unit = self.scale, self.unit
        rows, columns = slices
        enlarge = not rows and self.upsize == "always"
        whole = view_size(size, scale, unit, enlarge=enlarge)
        grid = _tokens(whole, unit)
        if not rows:
            return PreprocessParams(whole, grid, (ImageView(whole),), None, self.resample)
        height, width = slice_size(size, slices, scale, unit)
        grid += (*slices, *_tokens((height, width), unit))
        return stacked(whole, (rows * height, columns * width), grid, self.resample)

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        return fingerprint(family, (self.patch, self.merge), *self.colours, recipe)

    def tiles(self, grid: Grid) -> tuple[CanvasTile, ...]:
        if len(grid) == 2:
            return ()
        rows, columns, down, across, tall, wide = grid
        corners = [(0, 0, rows, columns)]
        corners += [
            (rows + tall * row, wide * column, tall, wide)
            for row in range(down)
            for column in range(across)
        ]
        found, unit, first = [], self.unit, 0
        for top, left, height, width in corners:
            edges = (unit * edge for edge in (top, left, top + height, left + width))
            last = first + height * width
            found.append(CanvasTile(Box(*edges), (height, width), (range(first, last),)))
            first = last
        return tuple(found)

    def num_tokens(self, grid: Grid) -> int:
        return sum(view_tokens(grid))

    def num_patches(self, grid: Grid) -> int:
        return self.num_tokens(grid) * self.merge**2


def _tokens(size: Size, unit: int) -> tuple[int, ...]:
    return size[0] // unit, size[1] // unit


def view_tokens(grid: Grid) -> list[int]:
    """Return the number of tokens of the whole image, then of each slice."""
    whole = [grid[0] * grid[1]]
    return whole if len(grid) == 2 else whole + [grid[4] * grid[5]] * (grid[2] * grid[3])


def slice_grid(size: Size, scale: int, least: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of slices of about scale x scale pixels each, or (0, 0) for none.

    Candidates have about as many slices as the image has pixels for, between `least` and `most`.
    The grid with the closest aspect ratio wins. Of equally close grids, the one with the most rows
    wins.
    """
    height, width = size
    shape = math.log(width / height)
    multiple = max(min(math.ceil(width * height / (scale * scale)), most), least)
    if multiple <= 1:
        return 0, 0
    best, smallest = (1, 1), math.inf
    for count in (multiple - 1, multiple, multiple + 1):
        if count == 1 or not least <= count <= most:
            continue
        for rows in range(1, count + 1):
            if count % rows:
                continue
            error = abs(shape - math.log(count // rows / rows))
            if error < smallest or (error == smallest and rows > best[0]):
                best, smallest = (rows, count // rows), error
    return best


def view_size(size: tuple[float, float], scale: int, unit: int, *, enlarge: bool) -> Size:
    """Return the size of a view of an image or slice, with its aspect ratio.

    The view has about scale x scale pixels. A smaller image is not enlarged, unless `enlarge` is
    set. Both edges are multiples of `unit`.
    """
    height, width = size
    if height * width > scale * scale or enlarge:
        shape = width / height
        height = int(scale / math.sqrt(shape))
        width = int(height * shape)
    return _multiple(height, unit), _multiple(width, unit)


def slice_size(size: Size, grid: tuple[int, int], scale: int, unit: int) -> Size:
    """Return the size of each slice."""
    height, width = (_multiple(edge, parts) / parts for edge, parts in zip(size, grid))
    return view_size((height, width), scale, unit, enlarge=True)


def _multiple(length: float, of: int) -> int:
    """Return the multiple of `of` nearest to `length`, at least `of`.

    Ties round to the even multiple (Python's `round`).
    """
    return max(round(length / of) * of, of)


def most_tokens(scale: int, unit: int, longest: float) -> int:
    """Return the maximum number of tokens of a view.

    unit: the edge of a token in pixels.
    longest: the maximum aspect ratio of the image.
    """
    # The tokens depend on the height: for each, the widest image has the widest view.
    heights = range(int(scale / math.sqrt(longest)), int(scale * math.sqrt(longest)) + 2)
    return max(
        (
            _multiple(height, unit) * _multiple(scale * scale / height, unit) // unit**2
            for height in heights
            if height
        ),
        default=1,
    )


def most_of_all(scale: int, unit: int, most: int, longest: float) -> int:
    """Return the maximum total number of tokens of an image and its up to `most` slices."""
    sliced = 0
    for count in range(2, most + 1):
        # The slices may be a single row or a single column.
        shape = max(longest / count, count) * MARGIN
        sliced = max(sliced, count * most_tokens(scale, unit, shape))
    return most_tokens(scale, unit, longest) + sliced


def read_images(checkpoint: Checkpoint, vision: MergingTower, sibling: Sibling) -> SliceRules:
    """Read the rules for resizing images from the checkpoint's files. Raises CheckpointError."""
    processor = checkpoint.processor
    patch = processor.integer("patch_size", default=14)
    if patch != vision.siglip.patch:
        raise CheckpointError(
            f"{processor.where}: patch_size is {patch}, but the vision encoder requires "
            f"{vision.siglip.patch}"
        )
    mode, made_for = (read_mode(each, sibling) for each in (processor, checkpoint.config))
    if mode != made_for:
        raise CheckpointError(
            f"{processor.where}: downsample_mode is {mode}, but it is {made_for} in config.json"
        )
    scale = processor.count("scale_resolution", default=448)
    most = processor.count("max_slice_nums", default=9)
    for name, value, limit in (
        ("scale_resolution", scale, MAX_SCALE),
        ("max_slice_nums", most, MAX_SLICES),
    ):
        if value > limit:
            raise CheckpointError(f"{processor.where}: {name} must be at most {limit}, not {value}")
    if not processor.flag("slice_mode", default=True):
        most = 1
    return SliceRules(
        scale,
        most,
        read_colours(processor, HALF, HALF),
        read_resample(processor, 3) if sibling.pages else _resample(processor),
        patch,
        vision.siglip.merge,
        _upsize(processor) if sibling.pages else "always",
    )


def _resample(processor: Section) -> Resample:
    number = processor.integer("resample", default=3)
    if number not in RESAMPLES:
        raise CheckpointError(
            f"{processor.where}: resample {number} is not supported (1 and 3 are)"
        )
    return RESAMPLES[number]


def _upsize(processor: Section) -> str:
    upsize = processor.text("small_image_upsize", default="always")
    if upsize not in UPSIZES:
        raise CheckpointError(
            f"{processor.where}: small_image_upsize {upsize!r} is not supported "
            f"({' and '.join(UPSIZES)} are): an image's size must not depend on its content"
        )
    return upsize
