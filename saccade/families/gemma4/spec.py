"""What can be said of a Gemma 4 checkpoint without tensors: sizes, prompt expansion, windows.

An image keeps its shape and fills a budget of tokens. A token's position is its place in the
prompt. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError, ImageError, InvalidRequest
from saccade.core.family import Cuts, KVSpec, LargestImage, PixelBounds, Templates, heads_cache
from saccade.core.recipe import ImageRecipe, whole
from saccade.core.types import Grid, Image, Span
from saccade.families.checkpoint import Checkpoint
from saccade.families.config_readers import text_section
from saccade.families.gemma4.config import (
    BUDGETS,
    BudgetRules,
    Gemma4Text,
    TowerConfig,
    parse_config,
)


@dataclass(frozen=True, slots=True)
class Gemma4Spec:
    """CPU facts of one Gemma 4 checkpoint; implements `core.family.FamilySpec`."""

    vision: TowerConfig
    text: Gemma4Text
    images: BudgetRules
    eos_token_ids: tuple[int, ...]
    dtype: str

    position_axes = 1
    templates = Templates()
    video = None

    @property
    def family(self) -> str:
        return "gemma4" if self.sees_images else "gemma4_text"

    @property
    def sees_images(self) -> bool:
        return self.vision.depth > 0

    def with_options(self, options: Mapping[str, str]) -> Gemma4Spec:
        spec = self
        for name, value in options.items():
            places = self.vision.places // self.vision.merge
            budgets = {str(each): each for each in BUDGETS if each <= places}
            if name != "max_soft_tokens" or value not in budgets:
                has = f"max_soft_tokens, one of {', '.join(budgets)}" if budgets else "no options"
                raise ConfigError(f"--family-option {name}={value}: {self.family} has {has}")
            spec = replace(spec, images=replace(spec.images, budget=budgets[value]))
        return spec

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        layers = self.text.layers
        return KVSpec(
            tuple(
                heads_cache(layer.kv_heads, layer.head_dim, ranks) if layer.source == at else ()
                for at, layer in enumerate(layers)
            ),
            tuple(layer.window for layer in layers),
            tuple(self.text.both_ways and layer.window is not None for layer in layers),
        )

    @property
    def encoder_blocks(self) -> int:
        return self.vision.depth

    @property
    def cuts(self) -> Cuts:
        text, vision, experts = self.text, self.vision, self.text.experts
        widths = sorted({layer.intermediate for layer in text.layers})
        return Cuts(
            text=((text.heads, "attention heads"), *((each, "MLP values") for each in widths)),
            heads=text.heads,
            kv_heads=min(layer.kv_heads for layer in text.layers),
            encoder=(
                (vision.heads.count, "vision attention heads"),
                (vision.intermediate, "vision MLP values"),
            ),
            encoder_width=vision.hidden,
            experts=experts.count if experts else 0,
            expert_width=experts.width if experts else 0,
            lasting=len(text.layers) * text.per_layer.width if text.per_layer else 0,
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
        """A request that narrows these takes the next smaller budget."""
        token = self.vision.unit**2
        least = token * self._budgets[0]
        return PixelBounds(least, least, token * self.images.budget)

    @property
    def _budgets(self) -> tuple[int, ...]:
        most = self.images.budget
        return (*(each for each in BUDGETS if each < most), most)

    @property
    def largest_image(self) -> LargestImage:
        return LargestImage(self.pixel_bounds.max_pixels, self.images.budget)

    @property
    def sample(self) -> ImageRecipe:
        return self._canvas(min(2, self.images.budget), 1)

    @property
    def patch_unit(self) -> int:
        return self.vision.merge**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> ImageRecipe:
        token = self.vision.unit**2
        budget = max(each for each in self._budgets if each * token <= bounds.max_pixels)
        if budget * token < bounds.min_pixels:
            raise ImageError(
                f"min_pixels is {bounds.min_pixels}, but within max_pixels {bounds.max_pixels} "
                f"images of this model have at most {budget * token} pixels ({budget} tokens)"
            )
        return self._canvas(*fit(height, width, budget, self.vision.unit))

    def _canvas(self, rows: int, columns: int) -> ImageRecipe:
        """Of so many tokens."""
        unit = self.vision.unit
        canvas = whole((rows * unit, columns * unit), (rows, columns))
        return replace(canvas, resample=self.images.resample)

    def settings(self, recipe: ImageRecipe) -> bytes:
        return self.images.fingerprint(self.family, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Tokens down and across, of a canvas."""
        assert height % self.vision.unit == 0 and width % self.vision.unit == 0
        return height // self.vision.unit, width // self.vision.unit

    def num_tokens(self, grid: Grid) -> int:
        return math.prod(grid)

    def num_patches(self, grid: Grid) -> int:
        return math.prod(grid) * self.vision.merge**2

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], _times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """An image is a first token, its rows, a last token."""
        rules = self.images
        found = [at for at, token in enumerate(tokens) if token == rules.content]
        if len(found) != len(images):
            raise InvalidRequest(
                f"the prompt has {len(found)} image placeholders for {len(images)} images",
                param="messages",
            )
        expanded: list[int] = []
        spans, done = [], 0
        for number, (at, image) in enumerate(zip(found, images)):
            expanded += [*tokens[done:at], rules.begin]
            spans.append(Span(len(expanded), image.num_tokens, number))
            expanded += [*[rules.content] * image.num_tokens, rules.end]
            done = at + 1
        expanded += tokens[done:]
        return tuple(expanded), tuple(spans)

    def widened(self, at: int, spans: Sequence[Span], _images: Sequence[Image]) -> int:
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


def fit(height: int, width: int, budget: int, unit: int) -> tuple[int, int]:
    """Tokens down and across for an image that keeps its shape within a budget: as many as whole
    tokens of `unit` pixels go into the shape that fills it, at least one. The arithmetic is
    transformers', to the last bit.
    """
    factor = math.sqrt(budget * unit**2 / (height * width))
    rows, columns = int(factor * height / unit), int(factor * width / unit)
    if not rows:
        return 1, max(1, min(width // height, budget))
    if not columns:
        return max(1, min(height // width, budget)), 1
    return rows, columns


def gemma4_spec(checkpoint: Checkpoint) -> Gemma4Spec:
    """Read a Gemma 4 checkpoint's facts. Raises CheckpointError naming file and field."""
    vision, text, images = parse_config(checkpoint)
    section = text_section(checkpoint.config)
    return Gemma4Spec(
        vision=vision,
        text=text,
        images=images,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )
