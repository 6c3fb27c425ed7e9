"""The images of a Qwen-VL checkpoint. Runs without torch."""

from __future__ import annotations

from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import CLIP_MEAN, CLIP_STD, HALF, check_made_for
from saccade.families.kit.native_images import ImageRules, read_rules
from saccade.families.qwen_vl.config import VisionConfig


def read_images(processor: Section, vision: VisionConfig) -> ImageRules:
    """Return the rules that the image processor's file asks for. Raises CheckpointError."""
    patch, merge, frames = vision.patch, vision.merge, vision.temporal_patch
    check_made_for(processor, patch_size=patch, merge_size=merge, temporal_patch_size=frames)
    newer = vision.variant == "qwen3_vl"
    bounds = (256 * 256, 4096 * 4096) if newer else (56 * 56, 28 * 28 * 16384)
    colours = (HALF, HALF) if newer else (CLIP_MEAN, CLIP_STD)
    absent = ImageRules(patch, merge, *bounds, *colours, temporal_patch=frames)
    return read_rules(processor, absent)
