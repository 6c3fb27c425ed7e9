"""The tile rules of published checkpoints by family, and results from an earlier report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from saccade.core.family import TileLayout
from saccade.families.kit.base_spec import ImageLayout
from saccade.families.kit.config_readers import CLIP_MEAN, CLIP_STD, HALF
from saccade.plugins.models.deepseek_vl2.images import CandidateRules
from saccade.plugins.models.internvl.images import TileRules
from saccade.plugins.models.minicpm.images import SliceRules
from saccade.plugins.models.smolvlm.images import SplitRules
from saccade.plugins.models.step3_vl.images import CropRules, Sides

CANDIDATES = (
    (384, 384), (384, 768), (768, 384), (384, 1152), (1152, 384), (384, 1536), (1536, 384),
    (768, 768), (384, 1920), (1920, 384), (384, 2304), (2304, 384), (768, 1152), (1152, 768),
    (384, 2688), (2688, 384), (384, 3072), (3072, 384), (768, 1536), (1536, 768), (384, 3456),
    (3456, 384), (1152, 1152),
)  # fmt: skip
"""DeepSeek-VL2's candidate resolutions, (width, height)."""


class TiledLayout(ImageLayout, TileLayout, Protocol):
    """A family's layout that supports both images and tiles."""


@dataclass(frozen=True, slots=True)
class PublishedTiles:
    """A family's tiles.

    reported: percentage of unchanged pixels, as the mean of eight events on another desktop.
    leads: True if tiles come before the thumbnail in the prompt.
    """

    layout: TiledLayout
    reported: int
    leads: bool


FAMILIES: Mapping[str, PublishedTiles] = {
    "InternVL3": PublishedTiles(
        TileRules(448, 1, 12, (CLIP_MEAN, CLIP_STD), "bicubic", 256, 1025), 62, leads=True
    ),
    "SmolVLM2, Idefics3": PublishedTiles(
        SplitRules(512, 2048, True, (HALF, HALF), "lanczos", 64, 1024), 70, leads=True
    ),
    "Step3-VL-10B": PublishedTiles(
        CropRules(Sides(3024, 728, 504), CLIP_MEAN, CLIP_STD, 14), 56, leads=True
    ),
    "MiniCPM-V 4.6": PublishedTiles(
        SliceRules(448, 9, (HALF, HALF), "pillow_bicubic", 14, 4), 62, leads=False
    ),
    "DeepSeek-VL2": PublishedTiles(
        CandidateRules(384, CANDIDATES, (HALF, HALF), 14, 729), 62, leads=False
    ),
}
