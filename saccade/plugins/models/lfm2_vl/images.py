"""The layout of an LFM2-VL image. A small image keeps its aspect ratio. A large one is divided into
square tiles, which a thumbnail of the whole image follows in most checkpoints.

Sizes are exactly the same as in transformers' image processor. Does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.core.family import CanvasTile, LargestImage, PixelBounds
from saccade.core.recipe import Box, ImageView, PreprocessParams, Resample, stacked
from saccade.core.types import Grid, Size
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import (
    MAX_ASPECT,
    check_aspect,
    fingerprint,
    stacked_bounds,
)
from saccade.families.kit.config_readers import HALF, read_colours, read_resample
from saccade.nn.shapes import Colours, SiglipConfig

MAX_TILES = 100
"""Maximum tiles of an image. No published checkpoint has more than ten."""
MAX_TOKENS = 1 << 16
"""Maximum tokens of a tile or thumbnail."""


@dataclass(frozen=True, slots=True)
class ThumbnailRules:
    """Implements `ImageLayout` and `TileLayout`.

    A view of the whole image has `least` to `most` tokens. An image with more than `tolerance`
    times `most` is divided into `fewest` to `tiles_at_most` tiles of `tile` x `tile` pixels. If
    `thumbnail` is set, the view of the whole image follows the tiles. A token is merge x merge
    patches of `patch` x `patch` pixels.

    An image's grid is the whole image's rows and columns of tokens (0 without a thumbnail), and
    with tiles also their rows and columns. On the canvas, the grid of tiles is above the whole
    image. The space to the right of the narrower one is empty.
    """

    least: int
    most: int
    tolerance: float
    fewest: int
    tiles_at_most: int
    tile: int
    thumbnail: bool
    colours: Colours
    resample: Resample
    patch: int
    merge: int

    @property
    def unit(self) -> int:
        """The edge, in pixels, of the square that becomes one token."""
        return self.patch * self.merge

    @property
    def pixel_bounds(self) -> PixelBounds:
        least = self.least * self.unit**2
        most = max(self.tiles_at_most * self.tile**2, self.most * self.unit**2)
        return PixelBounds(least, least, most)

    @property
    def largest_image(self) -> LargestImage:
        """Upper bounds on the pixels and tokens of an image."""
        lines = (math.isqrt(MAX_ASPECT * count) + 2 for count in (self.least, self.most))
        whole = self.most + self.least + max(lines)
        tiles = self.tiles_at_most * (self.tile // self.unit) ** 2
        return stacked_bounds(whole + tiles, self.unit)

    @property
    def sample(self) -> PreprocessParams:
        return self._recipe((self.tile,) * 2, (0, 0), (self.least, self.most))

    @property
    def patch_unit(self) -> int:
        return self.merge**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        check_aspect(height, width, MAX_ASPECT)
        area = self.unit**2
        most = max(1, min(self.most, bounds.max_pixels // area))
        least = min(most, max(self.least, -(-bounds.min_pixels // area)))
        count = min(self.tiles_at_most, bounds.max_pixels // self.tile**2)
        cut = (0, 0)
        if self._is_large((height, width)) and count >= self.fewest:
            cut = tile_grid((height, width), self.tile, self.fewest, count)
        return self._recipe((height, width), cut, (least, most))

    def _is_large(self, size: Size) -> bool:
        if self.fewest == self.tiles_at_most == 1:
            return False
        height, width = (max(self.patch, _nearest(edge, self.unit)) for edge in size)
        return height * width > self.most * self.unit**2 * self.tolerance

    def _recipe(
        self, size: Size, cut: tuple[int, int], tokens: tuple[int, int]
    ) -> PreprocessParams:
        whole = view_size(size, self.unit, *tokens)
        grid: Grid = (whole[0] // self.unit, whole[1] // self.unit)
        rows, columns = cut
        if rows * columns <= 1:
            return PreprocessParams(whole, grid, (ImageView(whole),), None, self.resample)
        tiles = rows * self.tile, columns * self.tile
        if not self.thumbnail:
            return PreprocessParams(tiles, (0, 0, *cut), (ImageView(tiles),), None, self.resample)
        return stacked(tiles, whole, (*grid, *cut), self.resample)

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        return fingerprint(family, (self.patch, self.merge), *self.colours, recipe)

    def tiles(self, grid: Grid) -> tuple[CanvasTile, ...]:
        if len(grid) == 2:
            return ()
        rows, columns, down, across = grid
        side, edge = self.tile, self.tile // self.unit
        found, tokens = [], edge**2
        for number in range(down * across):
            top, left = number // across * side, number % across * side
            lines = (range(number * tokens, (number + 1) * tokens),)
            found.append(CanvasTile(Box(top, left, top + side, left + side), (edge, edge), lines))
        if not rows:
            return tuple(found)
        first = down * across * tokens
        top = down * side
        box = Box(top, 0, top + rows * self.unit, columns * self.unit)
        return (*found, CanvasTile(box, (rows, columns), (range(first, first + rows * columns),)))

    def view_tokens(self, grid: Grid) -> list[int]:
        """Return the number of tokens of each tile, then of the whole image if it is
        encoded, too.
        """
        rows, columns, *cut = grid
        tiles = [(self.tile // self.unit) ** 2] * math.prod(cut or (0,))
        return [*tiles, rows * columns] if rows else tiles

    def num_tokens(self, grid: Grid) -> int:
        return sum(self.view_tokens(grid))

    def num_patches(self, grid: Grid) -> int:
        return self.num_tokens(grid) * self.merge**2


def _nearest(length: int, unit: int) -> int:
    return round(length / unit) * unit


def view_size(size: Size, unit: int, least: int, most: int) -> Size:
    """Return the size of the whole image after resizing, in multiples of `unit`.

    The image then has `least` to `most` tokens, unless its aspect ratio makes that impossible.
    """
    height, width = size
    tall, wide = (max(unit, _nearest(edge, unit)) for edge in size)
    if tall * wide > most * unit**2:
        beta = math.sqrt((height * width) / (most * unit**2))
        tall, wide = (max(unit, math.floor(edge / beta / unit) * unit) for edge in size)
    elif tall * wide < least * unit**2:
        beta = math.sqrt(least * unit**2 / (height * width))
        tall, wide = (math.ceil(edge * beta / unit) * unit for edge in size)
    return tall, wide


def tile_grid(size: Size, tile: int, fewest: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of the grid of tiles closest to the image's aspect ratio.

    Of equally close grids, the last one with fewer than twice the image's pixels wins. Candidates
    are in transformers' order, which is the order of a set.
    """
    height, width = size
    shapes = {
        (across, down)
        for count in range(fewest, most + 1)
        for across in range(1, count + 1)
        for down in range(1, count + 1)
        if fewest <= across * down <= most
    }
    best, smallest = (1, 1), math.inf
    for across, down in sorted(shapes, key=lambda each: each[0] * each[1]):
        error = abs(width / height - across / down)
        ties = error == smallest and height * width > 0.5 * tile * tile * across * down
        if error < smallest or ties:
            best, smallest = (down, across), error
    return best


def read_images(processor: Section, vision: SiglipConfig) -> ThumbnailRules:
    """Read the rules for resizing images from the image processor's config. Raises
    CheckpointError.
    """
    where = processor.where
    for name, known in (("encoder_patch_size", vision.patch), ("downsample_factor", vision.merge)):
        if (value := processor.integer(name, default=known)) != known:
            raise CheckpointError(f"{where}: {name} is {value}, but it is {known} in config.json")
    unit = vision.patch * vision.merge
    tile = processor.count("tile_size", default=512)
    if tile % unit:
        raise CheckpointError(f"{where}: tile_size {tile} must be a multiple of {unit} pixels")
    least = processor.count("min_image_tokens", default=64)
    most = processor.count("max_image_tokens", default=256)
    fewest = processor.count("min_tiles", default=2)
    tiles = processor.count("max_tiles", default=10)
    if not (least <= most <= MAX_TOKENS and fewest <= tiles <= MAX_TILES):
        raise CheckpointError(
            f"{where}: min_image_tokens {least} to max_image_tokens {most} and min_tiles {fewest} "
            f"to max_tiles {tiles} must be ascending, up to {MAX_TOKENS} tokens and {MAX_TILES} "
            "tiles"
        )
    if not processor.flag("do_image_splitting", default=True):
        fewest = tiles = 1
    tolerance = processor.number("max_pixels_tolerance", default=2.0)
    colours = read_colours(processor, HALF, HALF)
    resample = read_resample(processor, 2)
    return ThumbnailRules(
        least,
        most,
        tolerance,
        fewest,
        tiles,
        tile,
        processor.flag("use_thumbnail", default=True),
        colours,
        resample,
        vision.patch,
        vision.merge,
    )
