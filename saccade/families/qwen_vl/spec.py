"""What can be said of a Qwen-VL checkpoint without tensors: sizes, token counts, prompt expansion,
rotary positions.

One spec serves Qwen2-VL, Qwen2.5-VL and Qwen3-VL (dense and with experts): they differ in
configuration only. Knows nothing of torch. Formulas follow transformers'
`get_rope_index` of these models, and are tested against them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError, ImageError, InvalidRequest
from saccade.core.family import (
    Cuts,
    KVSpec,
    LargestImage,
    PixelBounds,
    ScoreTemplates,
    Templates,
    heads_cache,
)
from saccade.core.recipe import ImageRecipe, whole
from saccade.core.types import Grid, Image, Span
from saccade.families.checkpoint import Checkpoint, read_pooling
from saccade.families.config_readers import text_section
from saccade.families.qwen_vl.config import (
    LONGEST_SIDE,
    ImageRules,
    PatchEmbedding,
    VisionConfig,
    parse_config,
    smart_resize,
)
from saccade.families.qwen_vl.video import QwenVideo, read_video
from saccade.nn.text_config import TextConfig

SCORES = ScoreTemplates(
    instruction="Represent the user's input.",
    query="Retrieve images or text relevant to the user's query.",
    judge="Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".',
    task="Given a search query, retrieve relevant candidates that answer the query.",
    marks=("<Instruct>: ", "<Query>:", "\n<Document>:"),
    empty="NULL",
    labels=("yes", "no"),
    min_pixels=4 * 32 * 32,
    max_pixels=1800 * 32 * 32,
)
"""Of Qwen3-VL-Embedding and Qwen3-VL-Reranker."""
TEMPLATES = Templates(
    tools=Path(__file__).parent / "tools.jinja",
    marks=("<|im_start|>", "<|vision_start|>"),
    scores=SCORES,
)


@dataclass(frozen=True, slots=True)
class QwenVLSpec:
    """CPU facts of one Qwen-VL checkpoint; implements `core.family.FamilySpec`."""

    family: str
    vision: VisionConfig
    text: TextConfig
    image_rules: ImageRules
    image_token_id: int
    video_token_id: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    video: QwenVideo | None = None
    patch_embed: PatchEmbedding = "auto"

    templates = TEMPLATES
    position_axes = 3

    def with_options(self, options: Mapping[str, str]) -> QwenVLSpec:
        spec = self
        for name, value in options.items():
            ways = {way: way for way in get_args(PatchEmbedding)}
            if name != "patch_embed" or value not in ways:
                raise ConfigError(
                    f"--family-option {name}={value}: {self.family} has patch_embed, which is "
                    f"{' or '.join(ways)}"
                )
            spec = replace(spec, patch_embed=ways[value])
        return spec

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        layer = heads_cache(self.text.kv_heads, self.text.head_dim, ranks)
        return KVSpec((layer,) * self.text.layers)

    @property
    def sees_images(self) -> bool:
        return self.vision.depth > 0

    @property
    def encoder_blocks(self) -> int:
        return self.vision.depth

    @property
    def cuts(self) -> Cuts:
        text, vision = self.text, self.vision
        experts = text.experts
        return Cuts(
            text=((text.heads, "attention heads"), *self._widths),
            heads=text.heads,
            kv_heads=text.kv_heads,
            encoder=(
                (vision.heads, "vision attention heads"),
                (vision.intermediate, "vision MLP values"),
            ),
            encoder_width=vision.hidden,
            experts=experts.count if experts and experts.layers else 0,
            expert_width=experts.width if experts and experts.layers else 0,
        )

    @property
    def _widths(self) -> tuple[tuple[int, str], ...]:
        """Widths of what stands between attentions, which are cut among ranks."""
        text, experts = self.text, self.text.experts
        mlp, some = (text.intermediate, "MLP values"), experts and experts.layers
        return () if experts is not None and len(some or ()) == text.layers else (mlp,)

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
        return self.text.hidden * (1 + len(self.vision.deepstack_layers))

    @property
    def pixel_bounds(self) -> PixelBounds:
        rules = self.image_rules
        return PixelBounds(rules.factor**2, rules.min_pixels, rules.max_pixels, as_edges=True)

    @property
    def largest_image(self) -> LargestImage:
        most = self.image_rules.max_pixels
        return LargestImage(most, most // self.image_rules.factor**2)

    @property
    def sample(self) -> ImageRecipe:
        side = 4 * self.image_rules.factor
        return whole((side, side), self.grid(side, side))

    @property
    def patch_unit(self) -> int:
        return self.vision.merge**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> ImageRecipe:
        size = self.image_size(height, width, self._rules(bounds))
        return whole(size, self.grid(*size))

    def settings(self, recipe: ImageRecipe) -> bytes:
        return self.image_rules.fingerprint(self.family, recipe)

    def _rules(self, bounds: PixelBounds) -> ImageRules:
        return replace(self.image_rules, min_pixels=bounds.min_pixels, max_pixels=bounds.max_pixels)

    def image_size(self, height: int, width: int, rules: ImageRules) -> tuple[int, int]:
        """(height, width) after resizing. Raises ImageError."""
        size = smart_resize(height, width, rules)
        if max(size) > LONGEST_SIDE * self.vision.patch:
            raise ImageError(
                f"the image is {width} x {height} px; the limit is "
                f"{LONGEST_SIDE * self.vision.patch} px on a side"
            )
        return size

    def grid(self, height: int, width: int) -> Grid:
        """Of a resized image: frames on its canvas (a still image is one, a pair of a video two),
        and patches along (height, width) of a frame.
        """
        assert height % self.image_rules.factor == 0 and width % self.image_rules.factor == 0
        return 1, height // self.vision.patch, width // self.vision.patch

    def num_tokens(self, grid: Grid) -> int:
        return self.num_patches(grid) // self.vision.merge**2

    def num_patches(self, grid: Grid) -> int:
        return math.prod(grid[1:])

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        pads = (self.image_token_id, self.video_token_id)
        found = [at for at, token in enumerate(tokens) if token in pads]
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
            time = times[number] if times else None
            spans.append(Span(len(expanded), image.num_tokens, number, time=time))
            expanded += [tokens[at]] * image.num_tokens
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
        h, w = grid[1] // self.vision.merge, grid[2] // self.vision.merge
        return np.indices((1, h, w)).reshape(3, -1)

    def positions(
        self, num_tokens: int, spans: Sequence[Span], blocks: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """mRoPE positions.

        An image takes as many steps as its longer side has merged patches, whatever its token
        count. Pairs of a video whose `time` is set begin at one position, apart on the time axis;
        what follows them goes on behind the largest (as in transformers 4).
        """
        positions = np.empty((3, num_tokens), dtype=np.int64)
        done = position = begin = 0
        in_video = False
        for span in spans:
            block = blocks[span.image]
            assert span.offset == 0 and span.length == block.shape[1], (
                "a Qwen-VL image stands in one piece"
            )
            if not (in_video and span.time is not None and span.start == done):
                begin = position = _count_on(positions, done, span.start, position)
            shown = positions[:, span.start : span.end]
            np.add(block, begin, out=shown)
            shown[0] += span.time or 0
            # the last token of each stands furthest on every axis
            position = max(position, int(shown[:, -1].max()) + 1)
            done, in_video = span.end, span.time is not None
        return positions, _count_on(positions, done, num_tokens, position)


def _count_on(positions: npt.NDArray[np.int64], start: int, end: int, position: int) -> int:
    """Fill [start, end) of all three axes with `position`, `position + 1`, ...; returns what comes
    next.
    """
    positions[:, start:end] = np.arange(position, position + end - start)
    return position + end - start


def qwen_vl_spec(checkpoint: Checkpoint) -> QwenVLSpec:
    """Read a Qwen-VL checkpoint's facts. Raises CheckpointError naming file and field."""
    parsed = parse_config(checkpoint)
    text, pooling = text_section(checkpoint.config), read_pooling(checkpoint.folder)
    if pooling is not None and pooling.task == "embed":  # its files may have no head
        parsed = replace(parsed, text=replace(parsed.text, tied=True))
    return QwenVLSpec(
        family=parsed.family,
        vision=parsed.vision,
        text=parsed.text,
        image_rules=parsed.image_rules,
        image_token_id=checkpoint.config.integer("image_token_id", default=151655),
        video_token_id=checkpoint.config.integer("video_token_id", default=151656),
        eos_token_ids=checkpoint.eos_token_ids(text),
        dtype=checkpoint.dtype(text),
        video=read_video(checkpoint, parsed.vision.variant, parsed.image_rules),
    )
