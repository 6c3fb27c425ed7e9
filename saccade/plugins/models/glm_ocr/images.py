"""The layout of a GLM-OCR image: like Qwen-VL's, except that small images are enlarged first.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from saccade.core.errors import CheckpointError
from saccade.core.family import PixelBounds
from saccade.core.types import Size
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    CLIP_MEAN,
    CLIP_STD,
    check_made_for,
    read_colours,
    read_resample,
)
from saccade.families.kit.native_images import RaisedRules
from saccade.plugins.models.glm_ocr.config import CogConfig


@dataclass(frozen=True, slots=True)
class GlmRules(RaisedRules):
    """Qwen-VL's layout, but an edge shorter than a token is first enlarged to one."""

    @property
    def pixel_bounds(self) -> PixelBounds:
        # The "edges" in the processor's config are pixels of several frames.
        return PixelBounds(self.factor**2, self.min_pixels, self.max_pixels)

    def raised(self, height: int, width: int) -> Size:
        scale = max(self.factor / height, self.factor / width)
        return int(height * scale), int(width * scale)

    def sized(self, size: Section) -> Self:
        frames = self.temporal_patch
        least = size.count("shortest_edge", default=frames * self.min_pixels)
        most = size.count("longest_edge", default=frames * self.max_pixels)
        if least % frames or most % frames:
            raise CheckpointError(
                f"{size.where}: shortest_edge and longest_edge must be multiples of {frames}"
            )
        return self.bounded(size.where, least // frames, most // frames)


def read_images(processor: Section, vision: CogConfig) -> GlmRules:
    """Read the rules for resizing images from the image processor's config. Raises
    CheckpointError.
    """
    patch, merge, frames = vision.patch, vision.merge, vision.frames
    check_made_for(processor, patch_size=patch, merge_size=merge, temporal_patch_size=frames)
    colours = read_colours(processor, CLIP_MEAN, CLIP_STD)
    resample = read_resample(processor, 3)
    rules = GlmRules(patch, merge, 0, 0, *colours, resample, temporal_patch=frames)
    usual = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}
    return rules.sized(processor.section("size").filled(usual))
