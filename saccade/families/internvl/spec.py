"""What can be said of an InternVL checkpoint without tensors: tiles, token counts, prompt
expansion.

An image is resized to a grid of square tiles whose shape is closest to its own, and cut up; where
there are several tiles, a thumbnail of the whole image follows. A token's position is its place in
the prompt. Knows nothing of torch. The choice of the grid follows transformers' GotOcr2 image
processor, and is tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError, InvalidRequest
from saccade.core.family import Cuts, KVSpec, LargestImage, PixelBounds, Templates, heads_cache
from saccade.core.recipe import Box, ImageRecipe, ImageTile, ImageView
from saccade.core.types import Grid, Image, Span
from saccade.families.checkpoint import Checkpoint
from saccade.families.internvl.config import (
    ImageTokens,
    InternVisionConfig,
    TileRules,
    parse_config,
)
from saccade.families.internvl.video import InternVideo, read_video
from saccade.nn.text_config import TextConfig

TEMPLATES = Templates(
    tools=Path(__file__).parent / "tools.jinja", marks=("<|im_start|>", "<IMG_CONTEXT>")
)
"""Checkpoints' own know no tools; their language models do."""


@dataclass(frozen=True, slots=True)
class InternVLSpec:
    """CPU facts of one InternVL checkpoint; implements `core.family.FamilySpec`.

    The grid of an image is its number of tiles, the thumbnail's included.
    """

    vision: InternVisionConfig
    text: TextConfig
    tiles: TileRules
    image_tokens: ImageTokens
    eos_token_ids: tuple[int, ...]
    dtype: str
    video: InternVideo | None = None

    family = "internvl"
    templates = TEMPLATES
    position_axes = 1
    sees_images = True

    def with_options(self, options: Mapping[str, str]) -> InternVLSpec:
        for name, value in options.items():
            raise ConfigError(f"--family-option {name}={value}: {self.family} has no options")
        return self

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        layer = heads_cache(self.text.kv_heads, self.text.head_dim, ranks)
        return KVSpec((layer,) * self.text.layers)

    @property
    def encoder_blocks(self) -> int:
        return self.vision.depth

    @property
    def cuts(self) -> Cuts:
        text, vision = self.text, self.vision
        return Cuts(
            text=((text.heads, "attention heads"), (text.intermediate, "MLP values")),
            heads=text.heads,
            kv_heads=text.kv_heads,
            encoder=(
                (vision.heads, "vision attention heads"),
                (vision.intermediate, "vision MLP values"),
                (vision.out_hidden, "projector values"),
            ),
            encoder_width=vision.hidden,
        )

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def context_length(self) -> int:
        return self.text.context_length

    @property
    def hidden_size(self) -> int:
        return self.text.hidden

    @property
    def embedding_width(self) -> int:
        return self.text.hidden

    @property
    def pixel_bounds(self) -> PixelBounds:
        tile = self.tiles.side**2
        return PixelBounds(tile, self.tiles.least * tile, self.tiles.most * tile)

    @property
    def largest_image(self) -> LargestImage:
        tiles = _with_thumbnail(self.tiles.most)
        return LargestImage(tiles * self.tiles.side**2, self.num_tokens((tiles,)))

    @property
    def sample(self) -> ImageRecipe:
        return self._recipe(1, 1)

    @property
    def patch_unit(self) -> int:
        """A tile's."""
        return self.vision.rows

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> ImageRecipe:
        return self._recipe(*tile_grid(height, width, self._rules(bounds)))

    def _recipe(self, rows: int, columns: int) -> ImageRecipe:
        side, count = self.tiles.side, rows * columns
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
        return ImageRecipe((side * tiles, side), (tiles,), views, resample=self.tiles.resample)

    def settings(self, recipe: ImageRecipe) -> bytes:
        return self.tiles.fingerprint(self.family, recipe)

    def _rules(self, bounds: PixelBounds) -> TileRules:
        """With as many tiles as lie within the bounds; the thumbnail counts nothing."""
        tile = self.tiles.side**2
        most = max(1, bounds.max_pixels // tile)
        return replace(self.tiles, least=min(most, -(-bounds.min_pixels // tile)), most=most)

    def grid(self, height: int, _width: int) -> Grid:
        """Of a canvas."""
        assert height % self.tiles.side == 0
        return (height // self.tiles.side,)

    def num_tokens(self, grid: Grid) -> int:
        return grid[0] * self.vision.tokens

    def num_patches(self, grid: Grid) -> int:
        """Class tokens included."""
        return grid[0] * self.vision.rows

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], _times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        ids = self.image_tokens
        found = [at for at, token in enumerate(tokens) if token == ids.content]
        if len(found) != len(images):
            raise InvalidRequest(
                f"the prompt has {len(found)} image placeholders for {len(images)} images",
                param="messages",
            )
        expanded: list[int] = []
        spans = []
        done = 0
        for number, (at, image) in enumerate(zip(found, images)):
            expanded += (*tokens[done:at], ids.begin)
            spans.append(Span(start=len(expanded), length=image.num_tokens, image=number))
            expanded += (*([ids.content] * image.num_tokens), ids.end)
            done = at + 1
        expanded += tokens[done:]
        return tuple(expanded), tuple(spans)

    def widened(self, at: int, spans: Sequence[Span], _images: Sequence[Image]) -> int:
        for span in spans:
            if span.start - 1 >= at:
                break
            at += 1 + span.length
        return at

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        return np.arange(self.num_tokens(grid))[None]

    def positions(
        self, num_tokens: int, _spans: Sequence[Span], _blocks: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Places in the prompt."""
        return np.arange(num_tokens)[None], num_tokens


def _with_thumbnail(tiles: int) -> int:
    return tiles + 1 if tiles > 1 else 1


def tile_grid(height: int, width: int, rules: TileRules) -> tuple[int, int]:
    """(rows, columns) of tiles for an image of that size: of the shapes closest to its own the one
    of fewest tiles, or a larger one of which the image fills more than half.
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


def internvl_spec(checkpoint: Checkpoint) -> InternVLSpec:
    """Read an InternVL checkpoint's facts. Raises CheckpointError naming file and field."""
    parsed = parse_config(checkpoint)
    text = checkpoint.config.section("text_config")
    return InternVLSpec(
        vision=parsed.vision,
        text=parsed.text,
        tiles=parsed.tiles,
        image_tokens=parsed.image_tokens,
        eos_token_ids=checkpoint.eos_token_ids(text),
        dtype=checkpoint.dtype(text),
        video=read_video(checkpoint, parsed.tiles),
    )
