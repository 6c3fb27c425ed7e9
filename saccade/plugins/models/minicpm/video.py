"""Videos of MiniCPM-V checkpoints: each frame is encoded like an image, but without an index.

Sampling and sizes follow transformers' video processor, and are tested against it. Does not import
torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from saccade.core.errors import ImageError, InvalidRequest
from saccade.core.family import PixelBounds
from saccade.core.recipe import PreprocessParams
from saccade.core.types import Grid
from saccade.core.video import MAX_FRAMES, FrameTimes, VideoOptions
from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.config_readers import read_colours
from saccade.plugins.models.minicpm.config import MERGES
from saccade.plugins.models.minicpm.images import SliceRules

VIDEO = "<|video_pad|>"
"""Marks a video in a chat template. In the expanded prompt, there is one for each embedding of the
frames.
"""
NUMBER = "<image_id>{}</image_id>"
TENTH = 0.1
"""The frames of a long video are chosen from frames at this interval in seconds."""
BICUBIC = 3


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Samples and resizes the frames of videos. Implements `core.video.VideoRules`."""

    slices: SliceRules
    token: int  # the ID of `VIDEO`
    numbered: bool  # each video is preceded by its index
    max_frames: int  # per video

    frames = 1
    fps = 1.0
    marks = (VIDEO,)

    def sample(self, total: int, fps: float, options: VideoOptions) -> tuple[int, ...]:
        """Return the indices of one frame per second, or of `max_frames` evenly spread frames if
        that is fewer.
        """
        if (count := options.num_frames) is not None:
            if count > total:
                raise InvalidRequest(
                    f"num_frames: {count} frames were requested, but the video has {total}: "
                    "request fewer",
                    "num_frames",
                )
            return tuple(np.linspace(0, total - 1, count, dtype=int).tolist())
        most = min(self.max_frames, options.max_frames or MAX_FRAMES, MAX_FRAMES)
        rate, seconds = options.fps or self.fps, total / fps
        if seconds * rate > most:
            last = int(seconds * rate / TENTH) - 1
            steps = [
                round(at * TENTH, 1) / rate for at in np.linspace(0, last, most, dtype=int).tolist()
            ]
        else:
            steps = [at / rate for at in range(math.ceil(seconds * rate))]
        return tuple(sorted({min(int(step * fps), total - 1) for step in steps}))

    def recipe(
        self, count: int, height: int, width: int, options: VideoOptions
    ) -> PreprocessParams:
        """Return the preprocessing parameters of a frame. Bounds apply to its pixels, as for an
        image.
        """
        bounds = self.slices.pixel_bounds
        most = options.max_pixels or bounds.max_pixels
        if options.total_pixels is not None:
            most = min(most, options.total_pixels // count)
        least = options.min_pixels or bounds.min_pixels
        if not bounds.least <= least <= most:
            raise ImageError(
                f"min_pixels is {least} and max_pixels {most}; a frame of this model has "
                f"{bounds.least} to {bounds.max_pixels} pixels"
            )
        return self.slices.recipe(height, width, PixelBounds(bounds.least, least, most))

    def grid(self, recipe: PreprocessParams) -> Grid:
        return recipe.grid

    def begin(self, number: int) -> str:
        return NUMBER.format(number) if self.numbered else ""

    def text(self, times: FrameTimes) -> str:
        return VIDEO * len(times.indices)

    def steps(self, times: FrameTimes) -> tuple[int | None, ...]:
        """Return 0 as the time of every frame. Images have no time, so only they get an index."""
        return (0,) * len(times.indices)


def read_video(checkpoint: Checkpoint, images: SliceRules, *, numbered: bool) -> FrameRules | None:
    """Return the checkpoint's rules for videos.

    Returns `None` if frames are stacked, larger than images, or normalized differently, because the
    vision encoder supports only one kind of preprocessing.

    numbered: whether each image in a prompt is preceded by its index.
    """
    section, token = checkpoint.video, checkpoint.config.integer("video_token_id", default=-1)
    mode = section.text("downsample_mode", default="")
    scale = section.integer("scale_resolution", default=images.scale)
    most = section.integer("max_slice_nums", default=images.most)
    if not section.flag("slice_mode", default=True):
        most = 1
    alike = (
        token >= 0,
        section.integer("patch_size", default=images.patch) == images.patch,
        MERGES.get(mode, images.merge) == images.merge,
        section.integer("stack_frames", default=1) == 1,
        section.integer("resample", default=BICUBIC) == BICUBIC,
        read_colours(section, *images.colours) == images.colours,
        0 < scale <= images.scale and 0 < most <= images.most,
    )
    if not all(alike):
        return None
    frames = replace(images, scale=scale, most=most, resample="bicubic", upsize="always")
    numbered &= checkpoint.processor.flag("use_image_id", default=True)
    return FrameRules(frames, token, numbered, section.count("max_num_frames", default=128))
