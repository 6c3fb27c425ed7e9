"""transformers' own code for videos, function by function: its classes ask for torchvision, which
none of these functions uses.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

STUBS = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


MODULES = (
    "qwen2_vl.video_processing_qwen2_vl",
    "qwen3_vl.video_processing_qwen3_vl",
    "internvl.video_processing_internvl",
    "qwen3_vl.processing_qwen3_vl",
    "qwen2_vl.processing_qwen2_vl",
    "qwen2_5_vl.processing_qwen2_5_vl",
    "internvl.processing_internvl",
    "minicpmv4_6.video_processing_minicpmv4_6",
)


def _without_torchvision() -> tuple[Any, ...]:
    leaf = f"{STUBS[-1]}.functional"
    added = [name for name in (*STUBS, leaf) if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) for name in added})
    if leaf in added:
        sys.modules[STUBS[-1]].functional = sys.modules[leaf]  # type: ignore[attr-defined]
    try:
        # By their whole names: their packages have something else in their place.
        return tuple(import_module(f"transformers.models.{name}") for name in MODULES)
    finally:
        for name in added:
            del sys.modules[name]


SECOND, THIRD, TILES, TEXT, TEXT_2, TEXT_2_5, TEXT_TILES, SLICES = _without_torchvision()


@dataclass(frozen=True)
class Own:
    """What a processor's methods look at in their `self`."""

    fps: float = 2
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    temporal_patch_size: int = 2
    initial_shift: bool = True


def sample(family: str, total: int, source_fps: float, **asked: Any) -> list[int]:
    """Indices of the frames that the family's processor looks at. Raises ValueError."""
    metadata = SimpleNamespace(total_num_frames=total, fps=source_fps)
    if family == "internvl":
        found = TILES.InternVLVideoProcessor.sample_frames(Own(), metadata, **asked)
    elif family in ("qwen2_vl", "qwen2_5_vl"):
        found = SECOND.Qwen2VLVideoProcessor.sample_frames(Own(), metadata, **asked)
    else:
        found = THIRD.Qwen3VLVideoProcessor.sample_frames(Own(), metadata, **asked)
    return [int(index) for index in found]


def size(
    family: str, count: int, height: int, width: int, least: int, most: int, factor: int
) -> tuple[int, int]:
    """(height, width) of frames after resizing. Raises ValueError."""
    if family in ("qwen2_vl", "qwen2_5_vl"):
        return SECOND.smart_resize(height, width, factor, least, most)
    return THIRD.smart_resize(
        count, height, width, factor=factor, min_pixels=least, max_pixels=most
    )


def timestamps(indices: list[int], fps: float) -> str:
    """What Qwen3-VL's processor writes for a video; a pair has one placeholder here."""
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=1, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
    )
    own = TEXT.Qwen3VLProcessor
    processor._calculate_timestamps = lambda *args: own._calculate_timestamps(processor, *args)
    pairs = (len(indices) + 1) // 2
    inputs = {
        "video_grid_thw": [np.array([pairs, 1, 1])],
        "video_metadata": [SimpleNamespace(frames_indices=list(indices), fps=fps)],
    }
    return own.replace_video_token(processor, inputs, 0)


def prompt(family: str, indices: list[int], fps: float, grid: tuple[int, ...]) -> str:
    """What the family's processor writes where a prompt names a video. grid: (pairs, rows, columns)
    of patches; of InternVL, (frames,).
    """
    if family == "internvl":
        marks = {"start_image_token": "<img>", "end_image_token": "</img>"}
        own = SimpleNamespace(**marks, image_token="<IMG_CONTEXT>", image_seq_length=4)
        inputs: dict[str, Any] = {"pixel_values_videos": [np.zeros(grid)]}
        return TEXT_TILES.InternVLProcessor.replace_video_token(own, inputs, 0)
    own = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
    )
    inputs = {"video_grid_thw": [np.array(grid)]}
    if family == "qwen2_vl":
        found = TEXT_2.Qwen2VLProcessor.replace_video_token(own, inputs, 0)
    elif family == "qwen2_5_vl":
        found = TEXT_2_5.Qwen2_5_VLProcessor.replace_video_token(own, inputs, 0)
    else:
        third = TEXT.Qwen3VLProcessor
        own._calculate_timestamps = lambda *args: third._calculate_timestamps(own, *args)
        inputs["video_metadata"] = [SimpleNamespace(frames_indices=list(indices), fps=fps)]
        return third.replace_video_token(own, inputs, 0)
    return f"{own.vision_start_token}{found}{own.vision_end_token}"


def patches(frames: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """Rows of normalised frames [T, 3, H, W], pair by pair."""
    flat, _, _, _ = SECOND.Qwen2VLVideoProcessor.patchify(None, frames[None], patch, merge, 2)
    return flat[0]
