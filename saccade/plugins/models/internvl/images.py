"""The layout of an InternVL image: resized to the grid with the closest aspect ratio, and divided
into square tiles.

If there are several tiles, a thumbnail of the whole image follows. The choice of the grid follows
transformers' GotOcr2 image processor, and is tested against it. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from saccade.core.errors import CheckpointError
from saccade.core.family import CanvasTile, LargestImage, PixelBounds
from saccade.core.recipe import Box, ImageTile, ImageView, PreprocessParams, Resample
from saccade.core.types import Grid
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import fingerprint
from saccade.families.kit.config_readers import CLIP_MEAN, CLIP_STD, check_made_for, read_colours
from saccade.nn.shapes import Colours
from saccade.plugins.models.internvl.config import InternVisionConfig

RESAMPLES: dict[int, Resample] = {2: "bilinear", 3: "bicubic"}
"""Supported resampling filters, by their number in Pillow."""
MAX_TILES = 256
"""Maximum tiles of an image. Published checkpoints have at most 12."""


@dataclass(frozen=True, slots=True)
class TileRules:
    """Implements `ImageLayout` and `TileLayout`.

    An image has `least` to `most` tiles of `side` x `side` pixels. The vision encoder maps a tile's
    `patch_unit` rows to `tokens` tokens. An image's grid is its number of tiles, including the
    thumbnail.
    """

    side: int
    least: int
    most: int
    colours: Colours
    resample: Resample
    tokens: int
    patch_unit: int

    @property
    def pixel_bounds(self) -> PixelBounds:
        tile = self.side**2
        return PixelBounds(tile, self.least * tile, self.most * tile)

    @property
    def largest_image(self) -> LargestImage:
        tiles = _with_thumbnail(self.most)
        return LargestImage(tiles * self.side**2, self.num_tokens((tiles,)))

    @property
    def sample(self) -> PreprocessParams:
        return self._recipe(1, 1)

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        """Return the preprocessing parameters within `bounds`, which do not count the thumbnail."""
        tile = self.side**2
        most = max(1, bounds.max_pixels // tile)
        within = replace(self, least=min(most, -(-bounds.min_pixels // tile)), most=most)
        return self._recipe(*tile_grid(height, width, within))

    def _recipe(self, rows: int, columns: int) -> PreprocessParams:
        side, count = self.side, rows * columns
        tiles = _with_thumbnail(count)
        views: tuple[ImageView, ...] = (ImageView((side, side), at=(side * (tiles - 1), 0)),)
        if count > 1:
            boxes = [
                Box(side * row, side * column, side * (row + 1), side * (column + 1))
                for row in range(rows)
                for column in range(columns)
            ]
            cut = tuple(ImageTile(box, (side * i, 0)) for i, box in enumerate(boxes))
            views = (ImageView((side * rows, side * columns), tiles=cut), *views)
        return PreprocessParams((side * tiles, side), (tiles,), views, resample=self.resample)

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        return fingerprint(family, self.side, *self.colours, recipe)

    def grid(self, height: int, _width: int) -> Grid:
        """Return the grid of a canvas of this size in pixels."""
        assert height % self.side == 0
        return (height // self.side,)

    def tiles(self, grid: Grid) -> tuple[CanvasTile, ...]:
        side, tokens = self.side, self.tokens
        return tuple(
            CanvasTile(
                Box(side * i, 0, side * (i + 1), side), (1,), (range(tokens * i, tokens * (i + 1)),)
            )
            for i in range(grid[0] if grid[0] > 1 else 0)
        )

    def num_tokens(self, grid: Grid) -> int:
        return grid[0] * self.tokens

    def num_patches(self, grid: Grid) -> int:
        """Count an image's patches, including one class token per tile."""
        return grid[0] * self.patch_unit


def _with_thumbnail(tiles: int) -> int:
    return tiles + 1 if tiles > 1 else 1


def tile_grid(height: int, width: int, rules: TileRules) -> tuple[int, int]:
    """Return the rows and columns of tiles for an image of this size.

    The grid with the closest aspect ratio wins. Of several with that ratio, the smallest wins,
    unless the image has more than half the pixels of a larger one.
    """
    shapes = sorted(
        (
            (columns, rows)
            for columns in range(1, rules.most + 1)
            for rows in range(1, rules.most // columns + 1)
            if columns * rows >= rules.least
        ),
        key=lambda shape: shape[0] * shape[1],
    )
    best, nearest = (1, 1), float("inf")
    for columns, rows in shapes:
        distance = abs(width / height - columns / rows)
        large = width * height > 0.5 * rules.side * rules.side * columns * rows
        if distance < nearest or (distance == nearest and large):
            best, nearest = (rows, columns), distance
    return best


def read_images(processor: Section, vision: InternVisionConfig) -> TileRules:
    """Read the rules for resizing images from the image processor's config. Raises
    CheckpointError.
    """
    check_made_for(processor.section("size"), height=vision.side, width=vision.side)
    number = processor.integer("resample", default=3)
    if number not in RESAMPLES:
        raise CheckpointError(
            f"{processor.where}: resample {number} is not supported (2 and 3 are)"
        )
    least = processor.integer("min_patches", default=1)
    most = processor.integer("max_patches", default=12)
    if not 1 <= least <= most <= MAX_TILES:
        raise CheckpointError(
            f"{processor.where}: min_patches is {least} and max_patches {most}: they must be "
            f"ascending, from 1 to {MAX_TILES}"
        )
    colours = read_colours(processor, CLIP_MEAN, CLIP_STD)
    resample = RESAMPLES[number]
    return TileRules(vision.side, least, most, colours, resample, vision.tokens, vision.rows)
