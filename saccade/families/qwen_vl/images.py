"""The images of a Qwen-VL checkpoint. Runs without torch."""

from __future__ import annotations

from dataclasses import replace

from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    check_made_for,
    read_resample,
)
from saccade.families.kit.native_images import CLASS_BOUNDS, ImageRules, read_rules
from saccade.families.qwen_vl.config import Variant, VisionConfig


def read_images(processor: Section, vision: VisionConfig) -> ImageRules:
    """Return the rules that the image processor's file asks for. Raises CheckpointError.

    Absent fields have the values of transformers' class, which serves all Qwen-VL models, and an
    absent file those of the published checkpoints.
    """
    patch, merge, frames = vision.patch, vision.merge, vision.temporal_patch
    check_made_for(processor, patch_size=patch, merge_size=merge, temporal_patch_size=frames)
    newer = vision.variant == "qwen3_vl" and not processor.data
    bounds = CLASS_BOUNDS if processor.data else published_bounds(vision.variant)
    colours = (HALF, HALF) if newer else (CLIP_MEAN, CLIP_STD)
    absent = ImageRules(patch, merge, *bounds, *colours, temporal_patch=frames)
    return replace(read_rules(processor, absent), resample=read_resample(processor, 3))


def published_bounds(variant: Variant) -> tuple[int, int]:
    """Return the pixels of an image, at least and at most, in the published checkpoints."""
    return (256 * 256, 4096 * 4096) if variant == "qwen3_vl" else (56 * 56, 28 * 28 * 16384)
