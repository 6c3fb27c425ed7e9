"""The spec of a Qwen-VL checkpoint: sizes, image preprocessing, prompts and rotary positions.

One class supports Qwen2-VL, Qwen2.5-VL and Qwen3-VL (dense and with experts), which differ only in
their configuration. Runs without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.family import ScoreTemplates, Templates
from saccade.families.checkpoint import Checkpoint, Section, read_pooling
from saccade.families.kit.base_spec import (
    FamilyOptions,
    Placeholder,
    read_options,
)
from saccade.families.kit.config_readers import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    check_made_for,
    read_resample,
    text_section,
)
from saccade.families.kit.grid_spec import GridSpec
from saccade.families.kit.native_images import CLASS_BOUNDS, ImageRules, read_rules
from saccade.families.qwen_vl.config import (
    PatchEmbedding,
    Variant,
    VisionConfig,
    read_text,
    read_variant,
    read_vision,
)
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
"""The templates of Qwen3-VL-Embedding and Qwen3-VL-Reranker."""
TEMPLATES = Templates(
    tools=Path(__file__).parent / "tools.jinja",
    marks=("<|im_start|>", "<|vision_start|>"),
    scores=SCORES,
)


@dataclass(frozen=True, slots=True)
class QwenOptions(FamilyOptions):
    """The options that `--family-option` sets for Qwen-VL."""

    patch_embed: PatchEmbedding = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVLSpec(GridSpec):
    """Qwen-VL's `FamilySpec`: sizes, image preprocessing, prompts and positions, importable without
    torch.
    """

    vision: VisionConfig
    video: QwenVideo | None = None
    patch_embed: PatchEmbedding = "auto"

    def with_options(self, options: Mapping[str, str]) -> QwenVLSpec:
        chosen = read_options(QwenOptions, self.family, options)
        return replace(self, patch_embed=chosen.patch_embed)

    @property
    def embedding_width(self) -> int:
        return self.text.hidden * (1 + len(self.vision.deepstack_layers))


def qwen_vl_spec(checkpoint: Checkpoint) -> QwenVLSpec:
    """Read the spec of a Qwen-VL checkpoint. Raises CheckpointError with the file and the field."""
    config = checkpoint.config
    variant, section = read_variant(config), text_section(config)
    text = read_text(variant, config, section)
    vision = read_vision(variant, config, config.section("vision_config"), text.hidden)
    images = read_images(checkpoint.processor, vision)
    pooling = read_pooling(checkpoint.folder)
    # an embedding model may have no output head
    if pooling is not None and pooling.task == "embed":
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
    """Return the placeholder tokens of an image and of a pair of video frames.

    Raises CheckpointError.

    usual: the default for an image. The default for video frames is the token after it.
    """
    config = checkpoint.config
    image = config.integer("image_token_id", default=usual)
    return Placeholder((image, config.integer("video_token_id", default=usual + 1)))


def read_images(processor: Section, vision: VisionConfig) -> ImageRules:
    """Read the image preprocessing from the image processor's file. Raises CheckpointError.

    Missing fields have the defaults of transformers' class, which all Qwen-VL models share. If the
    file is missing, the values are those of the published checkpoints.
    """
    patch, merge, frames = vision.patch, vision.merge, vision.temporal_patch
    check_made_for(processor, patch_size=patch, merge_size=merge, temporal_patch_size=frames)
    newer = vision.variant == "qwen3_vl" and not processor.data
    bounds = CLASS_BOUNDS if processor.data else published_bounds(vision.variant)
    colours = (HALF, HALF) if newer else (CLIP_MEAN, CLIP_STD)
    absent = ImageRules(patch, merge, *bounds, *colours, temporal_patch=frames)
    return replace(read_rules(processor, absent), resample=read_resample(processor, 3))


def published_bounds(variant: Variant) -> tuple[int, int]:
    """Return the minimum and maximum pixels of an image in the published checkpoints of a
    variant.
    """
    return (256 * 256, 4096 * 4096) if variant == "qwen3_vl" else (56 * 56, 28 * 28 * 16384)
