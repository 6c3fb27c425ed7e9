"""What can be said of a Gemma 3 checkpoint without tensors: sizes, prompt expansion, windows.

Every image is resized to one square, whatever its shape, and has the same number of tokens, which
see each other in both directions. A token's position is its place in the prompt. Knows nothing of
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError, InvalidRequest
from saccade.core.family import Cuts, KVSpec, LargestImage, PixelBounds, Templates, heads_cache
from saccade.core.recipe import ImageRecipe, whole
from saccade.core.types import Grid, Image, Span
from saccade.families.checkpoint import Checkpoint
from saccade.families.config_readers import text_section
from saccade.families.gemma3.config import GemmaText, SquareRules, parse_config
from saccade.nn.siglip_config import SiglipConfig

ONE: Grid = (0, 0)
"""The grid of every image: one tile, as `nn/siglip.py` counts them."""


@dataclass(frozen=True, slots=True)
class Gemma3Spec:
    """CPU facts of one Gemma 3 checkpoint; implements `core.family.FamilySpec`."""

    vision: SiglipConfig
    text: GemmaText
    images: SquareRules
    eos_token_ids: tuple[int, ...]
    dtype: str

    position_axes = 1
    video = None

    @property
    def family(self) -> str:
        return "gemma3" if self.sees_images else "gemma3_text"

    @property
    def sees_images(self) -> bool:
        return self.vision.depth > 0

    @property
    def templates(self) -> Templates:
        return Templates(around=(self.images.mark, "\n\n") if self.sees_images else None)

    def with_options(self, options: Mapping[str, str]) -> Gemma3Spec:
        for name, value in options.items():
            raise ConfigError(f"--family-option {name}={value}: {self.family} has no options")
        return self

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        shape = self.text.shape
        sizes = shape.kv_heads, shape.head_dim, ranks
        return KVSpec(
            tuple(
                heads_cache(*sizes, window=window, both_ways=self.sees_images)
                for window in self.text.windows
            )
        )

    @property
    def encoder_blocks(self) -> int:
        return self.vision.depth

    @property
    def cuts(self) -> Cuts:
        text, vision = self.text.shape, self.vision
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

    @property
    def pixel_bounds(self) -> PixelBounds:
        square = self.vision.side**2
        return PixelBounds(square, square, square)

    @property
    def largest_image(self) -> LargestImage:
        return LargestImage(self.vision.side**2, self.vision.tokens)

    @property
    def sample(self) -> ImageRecipe:
        side = self.vision.side
        return replace(whole((side, side), ONE), resample=self.images.resample)

    @property
    def patch_unit(self) -> int:
        """An image's."""
        return self.vision.patches

    def recipe(self, _height: int, _width: int, _bounds: PixelBounds) -> ImageRecipe:
        return self.sample

    def settings(self, recipe: ImageRecipe) -> bytes:
        return self.images.fingerprint(self.family, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Of a canvas."""
        assert height == width == self.vision.side
        return ONE

    def num_tokens(self, _grid: Grid) -> int:
        return self.vision.tokens

    def num_patches(self, _grid: Grid) -> int:
        return self.vision.patches

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], _times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """An image is its first token, its rows, its last token. The blank lines around these are
        text (`Templates.around`).
        """
        rules, length = self.images, self.vision.tokens
        found = [at for at, token in enumerate(tokens) if token == rules.begin]
        if len(found) != len(images):
            raise InvalidRequest(
                f"the prompt has {len(found)} image placeholders for {len(images)} images",
                param="messages",
            )
        expanded: list[int] = []
        spans, done = [], 0
        for number, at in enumerate(found):
            expanded += tokens[done : at + 1]
            spans.append(Span(len(expanded), length, number))
            expanded += [*[rules.content] * length, rules.end]
            done = at + 1
        expanded += tokens[done:]
        return tuple(expanded), tuple(spans)

    def widened(self, at: int, spans: Sequence[Span]) -> int:
        for span in spans:
            if span.start > at:
                break
            at += span.length + 1
        return at

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        return np.arange(self.num_tokens(grid))[None]

    def positions(
        self, num_tokens: int, _spans: Sequence[Span], _blocks: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Places in the prompt."""
        return np.arange(num_tokens)[None], num_tokens


def gemma3_spec(checkpoint: Checkpoint) -> Gemma3Spec:
    """Read a Gemma 3 checkpoint's facts. Raises CheckpointError naming file and field."""
    vision, text, images = parse_config(checkpoint)
    section = text_section(checkpoint.config)
    return Gemma3Spec(
        vision=vision,
        text=text,
        images=images,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )
