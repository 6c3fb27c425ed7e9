"""A PaddleOCR-VL image: it keeps its shape, as Qwen-VL's, but small ones are enlarged first.

Runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from saccade.core.types import Size
from saccade.families.checkpoint import Section
from saccade.families.config_readers import CLIP_MEAN, CLIP_STD, read_colours, read_resample
from saccade.families.qwen_vl.images import (
    RaisedRules,
    check_patches,
    check_pixels,
    read_bounds,
)
from saccade.families.qwen_vl.paddleocr_vl.config import FittedConfig


@dataclass(frozen=True, slots=True)
class PaddleRules(RaisedRules):
    """Qwen-VL's layout, in which each edge is raised to a token's in turn."""

    def raised(self, height: int, width: int) -> Size:
        if height < self.factor:
            height, width = self.factor, round(width * self.factor / height)
        if width < self.factor:
            height, width = round(height * self.factor / width), self.factor
        return height, width

    def sized(self, size: Section) -> Self:
        least = size.count("shortest_edge", "min_pixels", default=self.min_pixels)
        most = size.count("longest_edge", "max_pixels", default=self.max_pixels)
        return self.bounded(size.where, least, most)


def read_images(processor: Section, vision: FittedConfig) -> PaddleRules:
    """Return the rules that the image processor's file asks for. Raises CheckpointError."""
    patches = {"patch_size": vision.patch, "merge_size": vision.merge}
    check_patches(processor, **patches, temporal_patch_size=1)
    check_pixels(processor)
    least, most = read_bounds(processor, 384 * 384, 1536 * 1536)
    mean, std = read_colours(processor, CLIP_MEAN, CLIP_STD)
    rules = PaddleRules(
        patch=vision.patch,
        merge=vision.merge,
        min_pixels=least,
        max_pixels=most,
        mean=mean,
        std=std,
        resample=read_resample(processor, 3),
        temporal_patch=1,
    )
    return rules.bounded(processor.where, least, most)
