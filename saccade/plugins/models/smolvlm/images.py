"""The layout of a SmolVLM image: divided into tiles, followed by the whole image at a tile's size.

Its longer edge is resized to a fixed length, then both edges to whole tiles. The sizes follow
transformers' Idefics3 image processor, and are tested against it. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.core.family import CanvasTile, LargestImage, PixelBounds
from saccade.core.recipe import BLACK, Box, ImageView, PreprocessParams, Resample
from saccade.core.types import Grid, Size
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import fingerprint
from saccade.families.kit.config_readers import (
    HALF,
    read_colours,
    read_resample,
)
from saccade.nn.shapes import Colours, SiglipConfig

ALONE = (0, 0)
"""The grid of an image that is not divided."""
LONGEST = 4096
"""Maximum edge of an image in pixels. transformers would scale a larger image down once more."""
MAX_ACROSS = 32
"""Maximum tiles along an edge. No published checkpoint has more than six."""
RESIZED = "by torch"
"""Part of an image's cache key, since an earlier version resized with Pillow."""


@dataclass(frozen=True, slots=True)
class SplitRules:
    """Implements `ImageLayout` and `TileLayout`.

    An image's longer edge is resized to `edge` pixels. If `split` is set, the image is divided into
    tiles of `side` x `side` pixels. The vision encoder maps a tile's `patch_unit` patches to
    `tokens` tokens.

    An image's grid is its rows and columns of tiles, both 0 if it is not divided. On the canvas,
    the tiles are arranged in this grid. The whole image is below the first tile of the last row,
    and the rest of that row is empty.
    """

    side: int
    edge: int
    split: bool
    colours: Colours
    resample: Resample
    tokens: int
    patch_unit: int

    @property
    def across(self) -> int:
        """The number of tiles along the longer edge."""
        return -(-self.edge // self.side) if self.split else 1

    @property
    def pixel_bounds(self) -> PixelBounds:
        tile = self.side**2
        return PixelBounds(tile, tile, self.across**2 * tile)

    @property
    def largest_image(self) -> LargestImage:
        recipe = self.recipe(self.edge, self.edge, self.pixel_bounds)
        height, width = recipe.canvas
        return LargestImage(height * width, self.num_tokens(recipe.grid))

    @property
    def sample(self) -> PreprocessParams:
        return self._recipe((self.side, self.side), (self.side, self.side))

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        """Return the preprocessing parameters with the longest edge at which all tiles are within
        the bounds.
        """
        size, side = (height, width), self.side
        for across in range(self.across, 1, -1):
            resized = longest_edge(size, min(self.edge, across * side))
            cut = whole_tiles(resized, side)
            if cut[0] * cut[1] <= bounds.max_pixels:
                return self._recipe(resized, cut)
        edge = min(self.edge, side) if self.split else self.edge
        return self._recipe(longest_edge(size, edge), (side, side))

    def _recipe(self, resized: Size, cut: Size) -> PreprocessParams:
        """Return the preprocessing parameters for an image that is resized to `resized`, then to
        whole tiles.

        cut: the size in pixels after rounding to whole tiles.
        """
        side, resample = self.side, self.resample
        if not self.split or cut == (side, side):
            views: tuple[ImageView, ...] = (ImageView((side, side)),)
            return PreprocessParams((side, side), ALONE, views, None, resample, (resized,))
        height, width = cut
        grid, views = (height // side, width // side), (ImageView(cut),)
        views += (ImageView((side, side), at=(height, 0)),)
        return PreprocessParams(
            (height + side, width), grid, views, BLACK, resample, (resized, cut)
        )

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        return fingerprint(family, RESIZED, self.side, *self.colours, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of a canvas of this size in pixels."""
        side = self.side
        assert not height % side and not width % side
        return (height // side - 1, width // side) if height > side else ALONE

    def tiles(self, grid: Grid) -> tuple[CanvasTile, ...]:
        if grid == ALONE:
            return ()
        side, tokens, (rows, columns) = self.side, self.tokens, grid
        corners = [(row, column) for row in range(rows) for column in range(columns)]
        return tuple(
            CanvasTile(
                Box(side * row, side * column, side * (row + 1), side * (column + 1)),
                ALONE,
                (range(tokens * i, tokens * (i + 1)),),
            )
            for i, (row, column) in enumerate([*corners, (rows, 0)])
        )

    def num_tokens(self, grid: Grid) -> int:
        return (grid[0] * grid[1] + 1) * self.tokens

    def num_patches(self, grid: Grid) -> int:
        return (grid[0] * grid[1] + 1) * self.patch_unit


def longest_edge(size: Size, edge: int) -> Size:
    """Return the size whose longer edge is `edge`. The shorter edge is in proportion, and even.

    The arithmetic is the same as in transformers.
    """
    height, width = size
    aspect = width / height
    if width >= height:
        short = int(edge / aspect)
        return max(short + short % 2, 1), edge
    short = int(edge * aspect)
    return edge, max(short + short % 2, 1)


def whole_tiles(size: Size, side: int) -> Size:
    """Round both edges up to multiples of `side`, the shorter one in proportion."""
    height, width = size
    aspect = width / height
    if width >= height:
        width = -(-width // side) * side
        return -(-int(width / aspect) // side) * side, width
    height = -(-height // side) * side
    return height, -(-int(height * aspect) // side) * side


def read_images(processor: Section, vision: SiglipConfig) -> SplitRules:
    """Read the rules for resizing images from the image processor's config. Raises
    CheckpointError.
    """
    tile = processor.section("max_image_size")
    side = tile.integer("longest_edge", default=364)
    if side != vision.side:
        raise CheckpointError(
            f"{tile.where}: longest_edge is {side}, but the vision encoder requires {vision.side}"
        )
    size = processor.section("size")
    edge = size.integer("longest_edge", default=4 * 364)
    most = min(LONGEST, MAX_ACROSS * side)
    if not 2 <= edge <= most or edge % 2:
        raise CheckpointError(
            f"{size.where}: longest_edge is {edge}; it must be even, and at most {most}"
        )
    colours = read_colours(processor, HALF, HALF)
    split = processor.flag("do_image_splitting", default=True)
    resample = read_resample(processor, 1)
    return SplitRules(side, edge, split, colours, resample, vision.tokens, vision.patches)
