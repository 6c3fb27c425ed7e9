"""A HunyuanOCR image: it keeps its shape, as Qwen-VL's, and each line of its tokens has an end.

Runs without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from saccade.core.family import LargestImage
from saccade.core.types import Grid
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import CLIP_MEAN, CLIP_STD, check_made_for
from saccade.families.kit.native_images import MAX_ASPECT_RATIO, ImageRules, read_rules
from saccade.plugins.models.hunyuan_vl.config import LearnedConfig

AROUND = 2
"""Tokens before an image's first line and behind its last."""


@dataclass(frozen=True, slots=True)
class LineRules(ImageRules):
    """Qwen-VL's layout, with tokens at the ends of lines and around the image."""

    @property
    def largest_image(self) -> LargestImage:
        """Return upper bounds, which images stay below."""
        tokens = self.max_pixels // self.factor**2
        # Rounding may stretch a line of tokens to one and a half times the shape.
        lines = math.isqrt(3 * MAX_ASPECT_RATIO * tokens // 2) + 1
        return LargestImage(self.max_pixels, tokens + lines + AROUND)

    def lines(self, grid: Grid) -> tuple[int, int]:
        """Return how many lines an image has, and the tokens in each, its end not among them."""
        return grid[1] // self.merge, grid[2] // self.merge

    def num_tokens(self, grid: Grid) -> int:
        rows, columns = self.lines(grid)
        return rows * (columns + 1) + AROUND


def read_images(processor: Section, vision: LearnedConfig) -> LineRules:
    """Return the rules that the image processor's file asks for. Raises CheckpointError."""
    patch, merge = vision.patch, vision.merge
    check_made_for(processor, patch_size=patch, merge_size=merge, temporal_patch_size=1)
    processor.get("resample")  # the hub's file has 1, and the model's code resizes by 3
    bounds = 512 * 512, 2048 * 2048
    absent = LineRules(patch, merge, *bounds, CLIP_MEAN, CLIP_STD, temporal_patch=1)
    return read_rules(processor, absent)
