"""What a Qwen-VL checkpoint says without tensors: sizes, prompts, rotary positions.

One spec serves Qwen2-VL, Qwen2.5-VL and Qwen3-VL (dense and with experts): they differ in
configuration only. Formulas for positions follow these models' `get_rope_index` in transformers,
and are tested against them. Runs without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError
from saccade.core.family import ScoreTemplates, Templates
from saccade.core.types import Grid, Span
from saccade.families.base_spec import (
    DecoderSpec,
    FamilyOptions,
    Placeholder,
    read_options,
)
from saccade.families.checkpoint import Checkpoint, Section, read_pooling
from saccade.families.config_readers import text_section
from saccade.families.qwen_vl.config import (
    PatchEmbedding,
    VisionConfig,
    read_text,
    read_variant,
    read_vision,
)
from saccade.families.qwen_vl.images import ImageRules, RaisedRules, read_images
from saccade.families.qwen_vl.video import QwenVideo, read_video

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
class QwenOptions(FamilyOptions):
    """patch_embed: how pixels enter the vision tower (`PatchEmbedding`)."""

    patch_embed: PatchEmbedding = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec(DecoderSpec):
    """CPU facts of a model that counts an image's tokens by time, row and column."""

    images: ImageRules

    position_axes = 3

    @property
    def image_token_id(self) -> int:
        return self.placeholder.marks[0]

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        h, w = grid[1] // self.images.merge, grid[2] // self.images.merge
        return np.indices((1, h, w)).reshape(3, -1)

    def positions(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        blocks: Sequence[npt.NDArray[np.int64]],
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Return the mRoPE positions [3, T], and the next position.

        An image takes as many steps as its longer side has merged patches, whatever its token
        count. A video's pairs, whose `time` is set, begin at one position, apart on the time axis.
        What follows them goes on behind the largest (as in transformers 4).
        """
        positions = np.empty((3, len(tokens)), dtype=np.int64)
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
        return positions, _count_on(positions, done, len(tokens), position)


@dataclass(frozen=True, slots=True)
class SizeOptions(FamilyOptions):
    """size: bounds on images, a JSON object as the image processor's file has it."""

    size: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedSpec(GridSpec):
    """CPU facts of a model that enlarges images with an edge shorter than a token's."""

    images: RaisedRules

    def with_options(self, options: Mapping[str, str]) -> Self:
        given = options.get("size", "a JSON object")
        chosen = read_options(SizeOptions, self.family, options, size=(given,))
        if not chosen.size:
            return self
        size = read_size(chosen.size)
        return replace(self, images=self.images.sized(size))


def read_size(given: str) -> Section:
    """Return the bounds that a user has chosen. Raises ConfigError."""
    where = f"--family-option size={given}"
    try:
        size = json.loads(given)
    except ValueError:
        size = None
    if not isinstance(size, dict) or not size.keys() <= {"shortest_edge", "longest_edge"}:
        raise ConfigError(f"{where}: write a JSON object with shortest_edge and longest_edge")
    return Section(where, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVLSpec(GridSpec):
    """CPU facts of one Qwen-VL checkpoint."""

    vision: VisionConfig
    video: QwenVideo | None = None
    patch_embed: PatchEmbedding = "auto"

    def with_options(self, options: Mapping[str, str]) -> QwenVLSpec:
        chosen = read_options(QwenOptions, self.family, options)
        return replace(self, patch_embed=chosen.patch_embed)

    @property
    def embedding_width(self) -> int:
        return self.text.hidden * (1 + len(self.vision.deepstack_layers))


def _count_on(positions: npt.NDArray[np.int64], start: int, end: int, position: int) -> int:
    """Fill [start, end) on all three axes with `position`, `position + 1`, ...

    Returns the next position.
    """
    positions[:, start:end] = np.arange(position, position + end - start)
    return position + end - start


def qwen_vl_spec(checkpoint: Checkpoint) -> QwenVLSpec:
    """Read a Qwen-VL checkpoint's facts. Raises CheckpointError naming file and field."""
    config = checkpoint.config
    variant, section = read_variant(config), text_section(config)
    text = read_text(variant, config, section)
    vision = read_vision(variant, config, config.section("vision_config"), text.hidden)
    images = read_images(checkpoint.processor, vision)
    pooling = read_pooling(checkpoint.folder)
    if pooling is not None and pooling.task == "embed":  # its files may have no head
        text = replace(text, tied=True)
    return QwenVLSpec(
        family=config.text("model_type"),
        vision=vision,
        text=text,
        images=images,
        placeholder=read_placeholder(checkpoint, 151655),
        templates=TEMPLATES,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
        video=read_video(checkpoint, variant, images),
    )


def read_placeholder(checkpoint: Checkpoint, usual: int) -> Placeholder:
    """Return the tokens that stand for an image and for a pair of video frames.

    Raises CheckpointError.

    usual: the first token, where config.json is silent.
    """
    config = checkpoint.config
    image = config.integer("image_token_id", default=usual)
    return Placeholder((image, config.integer("video_token_id", default=usual + 1)))
