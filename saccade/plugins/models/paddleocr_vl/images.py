"""The layout of a PaddleOCR-VL image: like Qwen-VL's, except that small images are enlarged first.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from saccade.core.types import Size
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import CLIP_MEAN, CLIP_STD, check_made_for, read_resample
from saccade.families.kit.native_images import RaisedRules, read_rules
from saccade.plugins.models.paddleocr_vl.config import FittedConfig


@dataclass(frozen=True, slots=True)
class PaddleRules(RaisedRules):
    """Qwen-VL's layout, except that an edge shorter than a token is first enlarged to one token.
    The two edges are enlarged one after the other.
    """

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
    """Read the rules for resizing images from the image processor's config. Raises
    CheckpointError.
    """
    patch, merge = vision.patch, vision.merge
    check_made_for(processor, patch_size=patch, merge_size=merge, temporal_patch_size=1)
    bounds, resample = (384 * 384, 1536 * 1536), read_resample(processor, 3)
    absent = PaddleRules(patch, merge, *bounds, CLIP_MEAN, CLIP_STD, resample, temporal_patch=1)
    rules = read_rules(processor, absent)
    return rules.bounded(processor.where, rules.min_pixels, rules.max_pixels)
