"""What can be said of a SmolVLM checkpoint without tensors: tiles, token counts, prompt expansion.

An image's longer edge is resized to one length, then both edges to whole tiles; the whole image in
the size of one tile follows the tiles. Text in the prompt says each tile's row and column, so that
an image has a span for each tile. A token's position is its place in the prompt. Knows nothing of
torch. The sizes follow transformers' Idefics3 image processor, and are tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError, InvalidRequest
from saccade.core.family import Cuts, KVSpec, LargestImage, PixelBounds, Templates, heads_cache
from saccade.core.recipe import ImageRecipe, ImageView
from saccade.core.types import Grid, Image, Size, Span
from saccade.families.checkpoint import Checkpoint
from saccade.families.smolvlm.config import (
    Ids,
    ImageText,
    SplitRules,
    parse_config,
)
from saccade.nn.siglip_config import SiglipConfig
from saccade.nn.text_config import TextConfig

TEMPLATES = Templates(default=Path(__file__).parent / "chat.jinja")
BLACK = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class SmolVLMSpec:
    """CPU facts of one SmolVLM checkpoint; implements `core.family.FamilySpec`.

    The grid of an image is its rows and columns of tiles, both 0 if it is shown as one. On the
    canvas the tiles lie side by side, the whole image under the first of the last row, and nothing
    beside that.
    """

    family: str
    vision: SiglipConfig
    text: TextConfig
    tiles: SplitRules
    image_text: ImageText
    eos_token_ids: tuple[int, ...]
    dtype: str

    templates = TEMPLATES
    position_axes = 1
    sees_images = True
    video = None

    def with_options(self, options: Mapping[str, str]) -> SmolVLMSpec:
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
        return PixelBounds(tile, tile, self.tiles.across**2 * tile)

    @property
    def largest_image(self) -> LargestImage:
        edge = self.tiles.edge
        recipe = self.recipe(edge, edge, self.pixel_bounds)
        height, width = recipe.canvas
        return LargestImage(height * width, self.num_tokens(recipe.grid))

    @property
    def sample(self) -> ImageRecipe:
        side = self.tiles.side
        return self._recipe((side, side), (side, side))

    @property
    def patch_unit(self) -> int:
        """A tile's."""
        return self.vision.patches

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> ImageRecipe:
        """The tiles of the longest edge whose tiles lie within the bounds."""
        rules, size = self.tiles, (height, width)
        for across in range(rules.across, 1, -1):
            edge = min(rules.edge, across * rules.side)
            resized = longest_edge(size, edge)
            cut = whole_tiles(resized, rules.side)
            if cut[0] * cut[1] <= bounds.max_pixels:
                return self._recipe(resized, cut)
        side = rules.side
        edge = min(rules.edge, side) if rules.split else rules.edge
        return self._recipe(longest_edge(size, edge), (side, side))

    def _recipe(self, resized: Size, cut: Size) -> ImageRecipe:
        """resized: the image's size before it becomes whole tiles of `cut` pixels."""
        side, resample = self.tiles.side, self.tiles.resample
        if not self.tiles.split or cut == (side, side):
            views: tuple[ImageView, ...] = (ImageView((side, side)),)
            return ImageRecipe((side, side), (0, 0), views, None, resample, (resized,))
        height, width = cut
        grid, views = (height // side, width // side), (ImageView(cut),)
        views += (ImageView((side, side), at=(height, 0)),)
        return ImageRecipe((height + side, width), grid, views, BLACK, resample, (resized, cut))

    def settings(self, recipe: ImageRecipe) -> bytes:
        return self.tiles.fingerprint(self.family, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Of a canvas."""
        side = self.tiles.side
        assert not height % side and not width % side
        return (height // side - 1, width // side) if height > side else (0, 0)

    def num_tokens(self, grid: Grid) -> int:
        return _count(grid) * self.vision.tokens

    def num_patches(self, grid: Grid) -> int:
        return _count(grid) * self.vision.patches

    def _before(self, grid: Grid) -> list[Ids]:
        """The text before each tile, and before the whole image."""
        rows, columns = grid
        text = self.image_text
        if not rows:
            return [text.alone]
        found: list[Ids] = []
        for row in range(rows):
            found += (text.rows[row], *text.places[row][1:columns])
        return [*found, text.overall]

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], _times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        text, length = self.image_text, self.vision.tokens
        found = [at for at, token in enumerate(tokens) if token == text.content]
        if len(found) != len(images):
            raise InvalidRequest(
                f"the prompt has {len(found)} image placeholders for {len(images)} images",
                param="messages",
            )
        expanded: list[int] = []
        spans = []
        done = 0
        for number, (at, image) in enumerate(zip(found, images)):
            expanded += tokens[done:at]
            for tile, before in enumerate(self._before(image.grid)):
                expanded += before
                spans.append(Span(len(expanded), length, number, offset=tile * length))
                expanded += [text.content] * length
            expanded += text.end
            done = at + 1
        expanded += tokens[done:]
        return tuple(expanded), tuple(spans)

    def widened(self, at: int, spans: Sequence[Span], _images: Sequence[Image]) -> int:
        text = self.image_text
        for _, each in groupby(spans, lambda span: span.image):
            first, *others = each
            lead = text.rows[0] if others else text.alone
            start = first.start - len(lead)
            if start >= at:
                break
            end = (others[-1] if others else first).end + len(text.end)
            at += end - start - 1
        return at

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        return np.arange(self.num_tokens(grid))[None]

    def positions(
        self, num_tokens: int, _spans: Sequence[Span], _blocks: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Places in the prompt."""
        return np.arange(num_tokens)[None], num_tokens


def _count(grid: Grid) -> int:
    """Tiles, and the whole image."""
    return grid[0] * grid[1] + 1


def longest_edge(size: Size, edge: int) -> Size:
    """The longer edge as given, the other in proportion and even, in transformers' arithmetic."""
    height, width = size
    aspect = width / height
    if width >= height:
        short = int(edge / aspect)
        return max(short + short % 2, 1), edge
    short = int(edge * aspect)
    return edge, max(short + short % 2, 1)


def whole_tiles(size: Size, side: int) -> Size:
    """Both edges as multiples of `side`."""
    height, width = size
    aspect = width / height
    if width >= height:
        width = -(-width // side) * side
        return -(-int(width / aspect) // side) * side, width
    height = -(-height // side) * side
    return height, -(-int(height * aspect) // side) * side


def smolvlm_spec(checkpoint: Checkpoint) -> SmolVLMSpec:
    """Read a SmolVLM checkpoint's facts. Raises CheckpointError naming file and field."""
    parsed = parse_config(checkpoint)
    text = checkpoint.config.section("text_config")
    return SmolVLMSpec(
        family=parsed.family,
        vision=parsed.vision,
        text=parsed.text,
        tiles=parsed.tiles,
        image_text=parsed.image_text,
        eos_token_ids=checkpoint.eos_token_ids(text),
        dtype=checkpoint.dtype(text),
    )
