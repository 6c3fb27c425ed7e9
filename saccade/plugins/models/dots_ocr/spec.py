"""dots.ocr's `FamilySpec`.

Images are Qwen2-VL's. Their tokens have 1-D positions, like text. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from saccade.families.checkpoint import Checkpoint, Section
from saccade.families.kit.base_spec import DecoderSpec, Placeholder
from saccade.families.kit.config_readers import (
    CLIP_MEAN,
    CLIP_STD,
    check_made_for,
    read_resample,
    read_token,
)
from saccade.families.kit.native_images import ImageRules, read_rules
from saccade.nn.shapes import TextConfig
from saccade.plugins.models.dots_ocr.config import DotsConfig, read_text, read_vision


@dataclass(frozen=True, slots=True, kw_only=True)
class DotsSpec(DecoderSpec):
    """dots.ocr's `FamilySpec`: sizes, prompt expansion and positions, importable without torch."""

    vision: DotsConfig
    text: TextConfig
    images: ImageRules


def dots_spec(checkpoint: Checkpoint) -> DotsSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    text = read_text(config)
    vision = read_vision(config, text.hidden)
    image = read_token(config, text.vocab_size, "image_token_id", default=151665)
    return DotsSpec(
        family="dots_ocr",
        vision=vision,
        text=text,
        images=_images(checkpoint.processor, vision),
        placeholder=Placeholder((image,)),
        eos_token_ids=checkpoint.eos_token_ids(config),
        dtype=checkpoint.dtype(config),
    )


def _images(processor: Section, vision: DotsConfig) -> ImageRules:
    patch, merge = vision.patch, vision.merge
    check_made_for(processor, patch_size=patch, merge_size=merge)
    bounds = 56 * 56, 28 * 28 * 1280
    absent = ImageRules(patch, merge, *bounds, CLIP_MEAN, CLIP_STD, temporal_patch=1)
    return replace(read_rules(processor, absent), resample=read_resample(processor, 3))
