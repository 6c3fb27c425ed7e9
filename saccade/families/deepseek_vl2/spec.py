"""What can be said of a DeepSeek-VL2 checkpoint without tensors: tiles, tokens, prompt expansion,
what is kept of each token.

An image keeps its shape, within the candidate size that it fills best, cut into tiles; and is shown
once more as a whole, first. A token's position is its place in the prompt. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError, ImageError, InvalidRequest
from saccade.core.family import (
    Cuts,
    KVSpec,
    LargestImage,
    PixelBounds,
    Templates,
    heads_cache,
    latent_cache,
)
from saccade.core.recipe import ImageRecipe, ImageView
from saccade.core.types import Grid, Image, Size, Span
from saccade.families.checkpoint import Checkpoint
from saccade.families.deepseek_vl2.config import CandidateRules, DeepseekText, parse_config
from saccade.nn.siglip_config import SiglipConfig

TEMPLATES = Templates(default=Path(__file__).parent / "chat.jinja")
CUT_IMAGES = 2
"""In a prompt of more images, each is one tile."""
LONGEST_ASPECT = 200
"""Beyond this the published processor's image would vanish."""


@dataclass(frozen=True, slots=True)
class DeepseekSpec:
    """CPU facts of one checkpoint; implements `core.family.FamilySpec`.

    The grid of an image is its rows and columns of tiles. On the canvas the tiles lie side by side,
    the whole image under the first of the last row, and nothing beside that.
    """

    vision: SiglipConfig
    text: DeepseekText
    images: CandidateRules
    eos_token_ids: tuple[int, ...]
    dtype: str

    templates = TEMPLATES
    position_axes = 1
    video = None

    @property
    def family(self) -> str:
        return "deepseek_vl_v2" if self.sees_images else "deepseek_v2"

    @property
    def sees_images(self) -> bool:
        return self.vision.depth > 0

    def with_options(self, options: Mapping[str, str]) -> DeepseekSpec:
        for name, value in options.items():
            raise ConfigError(f"--family-option {name}={value}: {self.family} has no options")
        return self

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        shape, latent = self.text.shape, self.text.latent
        if latent is None:
            return KVSpec((heads_cache(shape.kv_heads, shape.head_dim, ranks),) * shape.layers)
        return KVSpec((latent_cache(latent.width),) * shape.layers)

    @property
    def encoder_blocks(self) -> int:
        return self.vision.depth

    @property
    def cuts(self) -> Cuts:
        text, vision, experts = self.text.shape, self.vision, self.text.shape.experts
        width = experts.width if experts else 0
        shared = self.text.routing.shared * width if self.text.routing else 0
        return Cuts(
            text=(
                (text.heads, "attention heads"),
                (text.intermediate, "MLP values"),
                *(((shared, "values of shared experts"),) if shared else ()),
            ),
            heads=text.heads,
            kv_heads=text.kv_heads,
            encoder=(
                (vision.heads, "vision attention heads"),
                (vision.intermediate, "vision MLP values"),
            ),
            encoder_width=vision.hidden,
            experts=experts.count if experts else 0,
            expert_width=width,
        )

    @property
    def vocab_size(self) -> int:
        return self.text.shape.vocab_size

    @property
    def context_length(self) -> int:
        return self.text.shape.context_length

    @property
    def hidden_size(self) -> int:
        return self.text.shape.hidden

    @property
    def embedding_width(self) -> int:
        return self.text.shape.hidden

    # ---- images

    @property
    def pixel_bounds(self) -> PixelBounds:
        tile = self.images.side**2
        largest = max((width * height for width, height in self.images.candidates), default=0)
        return PixelBounds(tile, tile, largest, CUT_IMAGES)

    @property
    def largest_image(self) -> LargestImage:
        side = self.images.side
        sizes = self.images.candidates
        found = [(self.num_tokens((h // side, w // side)), (h + side) * w) for w, h in sizes]
        tokens, pixels = (max(each, default=0) for each in zip(*found)) if found else (0, 0)
        return LargestImage(pixels, tokens)

    @property
    def sample(self) -> ImageRecipe:
        side = self.images.side
        return self._recipe((side, side), (side, side))

    @property
    def patch_unit(self) -> int:
        """A tile's."""
        return self.vision.patches

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> ImageRecipe:
        if max(height, width) > LONGEST_ASPECT * min(height, width):
            raise ImageError(
                f"the image is {width} x {height} px: its longer edge is more than "
                f"{LONGEST_ASPECT} times the shorter; crop it"
            )
        return self._recipe((height, width), self._best((height, width), bounds.max_pixels))

    def _best(self, size: Size, most: int) -> Size:
        """The candidate of which the image, within it, has most pixels (of its own at most); of
        several the one that it leaves least of; of these the first.
        """
        height, width = size
        best, chosen = (0, 0), (self.images.side, self.images.side)
        for across, down in self.images.candidates:
            if across * down > most:
                continue
            scale = min(across / width, down / height)
            filled = min(int(width * scale) * int(height * scale), width * height)
            found = (filled, filled - across * down)
            if filled and (best == (0, 0) or found > best):
                best, chosen = found, (down, across)
        return chosen

    def _recipe(self, size: Size, cut: Size) -> ImageRecipe:
        side, (height, width) = self.images.side, cut
        overall = padded(size, (side, side))
        top, left = overall.at
        views = (padded(size, cut), ImageView(overall.size, at=(height + top, left)))
        return ImageRecipe(
            (height + side, width),
            (height // side, width // side),
            views,
            self.images.fill,
            "pillow_bicubic",
        )

    def settings(self, recipe: ImageRecipe) -> bytes:
        return self.images.fingerprint(self.family, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Of a canvas."""
        side = self.images.side
        assert not height % side and not width % side and height > side
        return height // side - 1, width // side

    @property
    def _edge(self) -> int:
        """Tokens along a tile's edge: what is beyond the last whole one is filled with zeros."""
        return -(-self.vision.across // self.vision.merge)

    def num_tokens(self, grid: Grid) -> int:
        """The whole image, a separator, the tiles; each line of tokens has one more for its end."""
        edge, (rows, columns) = self._edge, grid
        return edge * (edge + 1) + 1 + rows * edge * (columns * edge + 1)

    def num_patches(self, grid: Grid) -> int:
        return (grid[0] * grid[1] + 1) * self.vision.patches

    # ---- prompts

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], _times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """A placeholder becomes as many; nothing stands around these."""
        content = self.images.content
        found = [at for at, token in enumerate(tokens) if token == content]
        if len(found) != len(images):
            raise InvalidRequest(
                f"the prompt has {len(found)} image placeholders for {len(images)} images",
                param="messages",
            )
        expanded: list[int] = []
        spans, done = [], 0
        for number, (at, image) in enumerate(zip(found, images)):
            expanded += tokens[done:at]
            spans.append(Span(len(expanded), image.num_tokens, number))
            expanded += [content] * image.num_tokens
            done = at + 1
        expanded += tokens[done:]
        return tuple(expanded), tuple(spans)

    def widened(self, at: int, spans: Sequence[Span], _images: Sequence[Image]) -> int:
        for span in spans:
            if span.start >= at:
                break
            at += span.length - 1
        return at

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        return np.arange(self.num_tokens(grid))[None]

    def positions(
        self, num_tokens: int, _spans: Sequence[Span], _blocks: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Places in the prompt."""
        return np.arange(num_tokens)[None], num_tokens


def padded(size: Size, into: Size) -> ImageView:
    """An image in its own shape, in the middle of a larger one: in Pillow's arithmetic
    (`ImageOps.pad`).
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


def deepseek_spec(checkpoint: Checkpoint) -> DeepseekSpec:
    """Read a checkpoint's facts. Raises CheckpointError naming file and field."""
    vision, text, images = parse_config(checkpoint)
    config = checkpoint.config
    section = config.section("language_config") if vision.depth else config
    return DeepseekSpec(
        vision=vision,
        text=text,
        images=images,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )
