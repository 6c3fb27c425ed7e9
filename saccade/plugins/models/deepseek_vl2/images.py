"""The layout of a DeepSeek-VL2 image: the whole image first, then its tiles.

The image is scaled, without changing its aspect ratio, to the candidate resolution that it fills
best. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.core.family import CanvasTile, LargestImage, PixelBounds
from saccade.core.recipe import Box, ImageView, PreprocessParams
from saccade.core.types import Grid, Size
from saccade.families.checkpoint import Checkpoint, Section, read_json
from saccade.families.kit.base_spec import check_aspect, fingerprint
from saccade.families.kit.config_readers import HALF, read_colours
from saccade.nn.shapes import Colours, SiglipConfig

ALONE = (0, 0)
"""The grid of a single tile, without newlines."""
CUT_IMAGES = 2
"""If a prompt has more images than this, each image is encoded as a single tile."""
MAX_ASPECT = 200
"""Maximum aspect ratio. Beyond it, the published processor would scale the image to nothing."""
MAX_TILES = 36
"""Maximum number of tiles in a candidate resolution. No published checkpoint has more than 9."""


@dataclass(frozen=True, slots=True)
class CandidateRules:
    """Implements `ImageLayout` and `TileLayout`.

    A tile is `side` x `side` pixels. `candidates` are the candidate resolutions (width, height),
    multiples of a tile. The vision encoder maps a tile's `patch_unit` patches to `edge` x `edge`
    tokens.

    An image's grid is its rows and columns of tiles. On the canvas, the tiles are arranged in this
    grid. The whole image is below the first tile of the last row, and the rest of that row is
    empty.
    """

    side: int
    candidates: tuple[tuple[int, int], ...]
    colours: Colours
    edge: int
    patch_unit: int

    @property
    def pixel_bounds(self) -> PixelBounds:
        tile = self.side**2
        largest = max((width * height for width, height in self.candidates), default=0)
        return PixelBounds(tile, tile, largest, CUT_IMAGES)

    @property
    def largest_image(self) -> LargestImage:
        side, sizes = self.side, self.candidates
        found = [(self.num_tokens((h // side, w // side)), (h + side) * w) for w, h in sizes]
        tokens, pixels = (max(each, default=0) for each in zip(*found)) if found else (0, 0)
        return LargestImage(pixels, tokens)

    @property
    def sample(self) -> PreprocessParams:
        return self._recipe((self.side, self.side), (self.side, self.side))

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        check_aspect(height, width, MAX_ASPECT)
        return self._recipe((height, width), self._best((height, width), bounds.max_pixels))

    def _best(self, size: Size, most: int) -> Size:
        """Return the candidate resolution that preserves the most pixels of the image.

        Enlarging an image does not count as preserving more. Ties are resolved by the smallest
        unused area, then by order.
        """
        height, width = size
        best, chosen = (0, 0), (self.side, self.side)
        for across, down in self.candidates:
            if across * down > most:
                continue
            scale = min(across / width, down / height)
            filled = min(int(width * scale) * int(height * scale), width * height)
            found = (filled, filled - across * down)
            if filled and (best == (0, 0) or found > best):
                best, chosen = found, (down, across)
        return chosen

    def _recipe(self, size: Size, cut: Size) -> PreprocessParams:
        side, (height, width) = self.side, cut
        overall = padded(size, (side, side))
        top, left = overall.at
        views = (padded(size, cut), ImageView(overall.size, at=(height + top, left)))
        red, green, blue = (int(value * 255) for value in self.colours[0])  # the padding's color
        grid = (height // side, width // side)
        return PreprocessParams(
            (height + side, width), grid, views, (red, green, blue), "pillow_bicubic"
        )

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        return fingerprint(family, self.colours, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of a canvas of this size in pixels."""
        side = self.side
        assert not height % side and not width % side and height > side
        return height // side - 1, width // side

    def tiles(self, grid: Grid) -> tuple[CanvasTile, ...]:
        """Return the tiles of a canvas. Their rows of tokens do not include newlines and the
        separator.
        """
        side, edge, (rows, columns) = self.side, self.edge, grid
        first, line = edge * (edge + 1) + 1, columns * edge + 1
        found = []
        for row in range(rows):
            for column in range(columns):
                start = first + row * edge * line + column * edge
                box = Box(side * row, side * column, side * (row + 1), side * (column + 1))
                found.append(CanvasTile(box, ALONE, _lines(start, line, edge)))
        box = Box(side * rows, 0, side * (rows + 1), side)
        return (*found, CanvasTile(box, ALONE, _lines(0, edge + 1, edge)))

    def num_tokens(self, grid: Grid) -> int:
        """Count the tokens of the whole image, the separator, and the tiles.

        Each line of tokens ends with a newline token.
        """
        edge, (rows, columns) = self.edge, grid
        return edge * (edge + 1) + 1 + rows * edge * (columns * edge + 1)

    def num_patches(self, grid: Grid) -> int:
        return (grid[0] * grid[1] + 1) * self.patch_unit


def _lines(first: int, line: int, edge: int) -> tuple[range, ...]:
    """Return the indices of a tile's tokens: `edge` lines of `edge` tokens each. Line starts are
    `line` tokens apart.
    """
    return tuple(range(at, at + edge) for at in range(first, first + edge * line, line))


NO_IMAGES = CandidateRules(0, (), (HALF, HALF), 0, 0)


def padded(size: Size, into: Size) -> ImageView:
    """Return how to scale an image to fit into `into` and center it, preserving its aspect ratio.

    Uses the arithmetic of Pillow's `ImageOps.pad`.
    """
    (height, width), (down, across) = size, into
    inner = into
    if width * down > across * height:
        inner = (max(1, round(height / width * across)), across)
    elif width * down < across * height:
        inner = (down, max(1, round(width / height * down)))
    if inner[1] != across:
        return ImageView(inner, at=(0, round((across - inner[1]) * 0.5)))
    return ImageView(inner, at=(round((down - inner[0]) * 0.5), 0))


def read_images(checkpoint: Checkpoint, vision: SiglipConfig) -> CandidateRules:
    """Read the rules for resizing images from the checkpoint's files. Raises CheckpointError."""
    config = checkpoint.config
    for name, wanted in (("tile_tag", "2D"), ("global_view_pos", "head")):
        if (found := config.text(name, default=wanted)) != wanted:
            raise CheckpointError(
                f"{config.where}: {name} {found!r} is not supported ({wanted} is)"
            )
    processor = read_json(checkpoint.folder / "processor_config.json", required=False)
    if not processor.flag("normalize", default=True):
        raise CheckpointError(f"{processor.where}: normalize false is not supported")
    side = config.section("vision_config").integer("image_size", default=384)
    # Zeros pad the patches of a tile to whole tokens.
    edge = -(-vision.across // vision.merge)
    colours = read_colours(processor, HALF, HALF)
    return CandidateRules(side, _candidates(config, side), colours, edge, vision.patches)


def _candidates(config: Section, side: int) -> tuple[tuple[int, int], ...]:
    listed = config.get("candidate_resolutions", [[side, side]])
    sizes = listed if isinstance(listed, list) else []
    found = tuple(
        (each[0], each[1])
        for each in sizes
        if isinstance(each, list)
        and len(each) == 2
        and all(isinstance(edge, int) and edge > 0 and not edge % side for edge in each)
        and each[0] * each[1] <= MAX_TILES * side**2
    )
    if not found or len(found) != len(sizes):
        raise CheckpointError(
            f"{config.where}: candidate_resolutions must be pairs of multiples of {side} (the "
            f"vision encoder's image_size), of at most {MAX_TILES} tiles each"
        )
    return found
