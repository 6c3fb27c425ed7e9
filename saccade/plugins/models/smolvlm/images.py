"""A SmolVLM image: cut into tiles, followed by the whole image in one tile's size.

Its longer edge is resized to one length, then both edges to whole tiles. The sizes follow
transformers' Idefics3 image processor, and are tested against it. Runs without torch.
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
"""The grid of an image that is shown as one."""
LONGEST = 4096
"""Pixels of an edge, beyond which transformers shrinks again."""
MAX_ACROSS = 32
"""Tiles; no checkpoint has more than six."""
RESIZED = "by torch"
"""Part of an image's name: an earlier version had Pillow's pixels, which are others."""


@dataclass(frozen=True, slots=True)
class SplitRules:
    """Implements `ImageLayout` and `TileLayout`.

    An image's longer edge is resized to `edge` pixels. With `split`, it is cut into `side` x `side`
    tiles. The tower turns a tile's `patch_unit` patches into `tokens`.

    An image's grid is its rows and columns of tiles, both 0 if it is shown as one. On the canvas
    the tiles are side by side. The whole image is under the first tile in the last row, and the
    rest there is empty.
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
        """Tiles along the longer edge."""
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
        """Return the recipe with the longest edge whose tiles stay within the bounds."""
        size, side = (height, width), self.side
        for across in range(self.across, 1, -1):
            resized = longest_edge(size, min(self.edge, across * side))
            cut = whole_tiles(resized, side)
            if cut[0] * cut[1] <= bounds.max_pixels:
                return self._recipe(resized, cut)
        edge = min(self.edge, side) if self.split else self.edge
        return self._recipe(longest_edge(size, edge), (side, side))

    def _recipe(self, resized: Size, cut: Size) -> PreprocessParams:
        """Return the recipe.

        resized: the image's size before it becomes whole tiles, `cut` pixels together.
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
        """Return the grid of a canvas."""
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
    """Return a size with the longer edge as given, the other in proportion and even.

    The arithmetic is transformers'.
    """
    height, width = size
    aspect = width / height
    if width >= height:
        short = int(edge / aspect)
        return max(short + short % 2, 1), edge
    short = int(edge * aspect)
    return edge, max(short + short % 2, 1)


def whole_tiles(size: Size, side: int) -> Size:
    """Return the size with both edges as multiples of `side`."""
    height, width = size
    aspect = width / height
    if width >= height:
        width = -(-width // side) * side
        return -(-int(width / aspect) // side) * side, width
    height = -(-height // side) * side
    return height, -(-int(height * aspect) // side) * side


def read_images(processor: Section, vision: SiglipConfig) -> SplitRules:
    """Return the tiles that the image processor's file asks for. Raises CheckpointError."""
    tile = processor.section("max_image_size")
    side = tile.integer("longest_edge", default=364)
    if side != vision.side:
        raise CheckpointError(
            f"{tile.where}: longest_edge is {side}, but the vision tower was made for {vision.side}"
        )
    size = processor.section("size")
    edge = size.integer("longest_edge", default=4 * 364)
    most = min(LONGEST, MAX_ACROSS * side)
    if not 2 <= edge <= most or edge % 2:
        raise CheckpointError(
            f"{size.where}: longest_edge is {edge}, but must be even, and at most {most}"
        )
    colours = read_colours(processor, HALF, HALF)
    split = processor.flag("do_image_splitting", default=True)
    resample = read_resample(processor, 1)
    return SplitRules(side, edge, split, colours, resample, vision.tokens, vision.patches)
