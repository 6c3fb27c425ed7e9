"""The layout of a HunyuanOCR image: like Qwen-VL's, with a newline after each line of tokens.

Does not import torch.
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
"""Number of tokens around an image: one before its first line, and one after its last."""


@dataclass(frozen=True, slots=True)
class LineRules(ImageRules):
    """Qwen-VL's layout, with a newline token per line, and one token on each side of the image."""

    @property
    def largest_image(self) -> LargestImage:
        """Upper bounds on the pixels and tokens of an image."""
        tokens = self.max_pixels // self.factor**2
        # Rounding may increase the aspect ratio by half.
        lines = math.isqrt(3 * MAX_ASPECT_RATIO * tokens // 2) + 1
        return LargestImage(self.max_pixels, tokens + lines + AROUND)

    def lines(self, grid: Grid) -> tuple[int, int]:
        """Return the number of lines, and the number of tokens in each, not counting the
        newline.
        """
        return grid[1] // self.merge, grid[2] // self.merge

    def num_tokens(self, grid: Grid) -> int:
        rows, columns = self.lines(grid)
        return rows * (columns + 1) + AROUND


def read_images(processor: Section, vision: LearnedConfig) -> LineRules:
    """Read the rules for resizing images from the image processor's config. Raises
    CheckpointError.
    """
    patch, merge = vision.patch, vision.merge
    check_made_for(processor, patch_size=patch, merge_size=merge, temporal_patch_size=1)
    processor.get("resample")  # ignored: the Hub's file has 1, but the published code uses 3
    bounds = 512 * 512, 2048 * 2048
    absent = LineRules(patch, merge, *bounds, CLIP_MEAN, CLIP_STD, temporal_patch=1)
    return read_rules(processor, absent)
