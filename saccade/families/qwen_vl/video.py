"""Video preprocessing of Qwen-VL: how frames are sampled and resized, their timestamps, prompt text
and positions.

The formulas are from transformers' video processors for Qwen2-VL (also used by Qwen2.5-VL) and for
Qwen3-VL (also used by Qwen3.5), and are tested against them. If a checkpoint has no video
configuration, frames have at most 768 tokens each, as in qwen-vl-utils.

Two details differ from transformers 5, and are as in training, in transformers 4 and in vLLM. A
Qwen3-VL video has no vision start and end tokens around all of its frame pairs. Positions after a
Qwen2-VL or Qwen2.5-VL video continue from the video's maximum position (`QwenVLSpec.positions`).
Runs without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from saccade.core.errors import ImageError, InvalidRequest
from saccade.core.recipe import PreprocessParams, whole
from saccade.core.types import Grid
from saccade.core.video import MAX_FRAMES, FrameTimes, VideoOptions, images_of
from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.config_readers import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    check_made_for,
    read_resample,
)
from saccade.families.kit.native_images import (
    MAX_ASPECT_RATIO,
    MAX_SIDE,
    ImageRules,
    read_rules,
    smart_resize,
)
from saccade.families.qwen_vl.config import Variant

START, PAD, END = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"
FRAME_TOKENS = 768
"""The default for the maximum tokens of a frame."""
MIN_TOKENS = 128
"""The default for the minimum tokens of a frame of Qwen2-VL."""
BUDGET_TOKENS = 24_576
"""The default for the maximum tokens of all frames of a Qwen3-VL video, before pairs are merged."""
MIN_EDGE = 4096
"""The default for the minimum pixels of all frames of a Qwen3-VL video together."""


@dataclass(frozen=True, slots=True)
class QwenVideo:
    """The sampling, sizes and prompt text of Qwen-VL's videos. Implements
    `core.video.VideoRules`.
    """

    # Preprocessing of frames. `min_pixels` and `max_pixels` bound one frame, or with `third` all
    # frames together.
    rules: ImageRules
    third: bool  # Qwen3-VL: a timestamp precedes each frame pair, which has separate positions
    fps: float
    num_frames: int | None
    min_frames: int
    max_frames: int
    cap: bool  # `cap_pixels_per_frame`: bound each frame by `max_video_tokens`
    max_video_tokens: int
    tokens_per_second: float | None  # steps on the time axis; `None` means one per frame pair
    frame_tokens: int = 0  # maximum tokens of a frame; 0 if only `rules` bound it

    frames = 2

    @property
    def marks(self) -> tuple[str, ...]:
        return (START + PAD + END, PAD) if self.third else (PAD,)

    def sample(self, total: int, fps: float, options: VideoOptions) -> tuple[int, ...]:
        most = min(self.max_frames, options.max_frames or MAX_FRAMES, MAX_FRAMES)
        count = options.num_frames
        if count is None and options.fps is None:
            count = self.num_frames
        wanted = options.fps or self.fps
        if self.third:
            if count is None:
                count = min(max(int(total / fps * wanted), self.min_frames), most, total)
            return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())
        if count is not None:
            count = max(2, round(count / 2) * 2)
            if count > total:
                raise InvalidRequest(
                    f"num_frames: {count} frames were requested, but the video has {total}: "
                    "request fewer",
                    "num_frames",
                )
        else:
            most = most // 2 * 2 if most < total else total // 2 * 2
            count = math.floor(min(max(total / fps * wanted, self.min_frames), most) / 2) * 2
        if count < 2:
            return (0,) if total == 1 else (0, total - 1)
        return _arange(total, count)

    def recipe(
        self, count: int, height: int, width: int, options: VideoOptions
    ) -> PreprocessParams:
        rows, columns = size = self._size(count, height, width, options)
        if max(size) > MAX_SIDE * self.rules.patch:
            raise ImageError(
                f"the video's frames are {width} x {height} px; the limit is "
                f"{MAX_SIDE * self.rules.patch} px on a side"
            )
        patch = self.rules.patch
        return whole(size, (1, rows // patch, columns // patch), self.rules.resample)

    def grid(self, recipe: PreprocessParams) -> Grid:
        return (self.frames, *recipe.grid[1:])

    def _size(self, count: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
        rules, unit = self.rules, self.rules.factor**2
        least, most = rules.min_pixels, rules.max_pixels
        count = max(count, 2)
        if options.max_pixels is None and options.min_pixels is None:
            if self.third:
                most = min(options.total_pixels or most, most)
                if self.cap:
                    share = max(min(self.max_video_tokens * unit, most // count), int(least * 1.05))
                    most = share * count
                if self.frame_tokens:
                    most = min(most, self.frame_tokens * unit * count)
                return video_resize(count, height, width, replace(rules, max_pixels=most))
            if self.cap or options.total_pixels is not None:
                whole_video = int(self.max_video_tokens * unit * 0.9) * 2
                total = options.total_pixels or whole_video
                most = max(min(most, total // count), int(least * 1.05))
            return smart_resize(height, width, replace(rules, max_pixels=most))
        # If the client bounds the size of a frame, it does not depend on the number of frames, so
        # that a video can grow.
        if self.third:
            least, most = max(unit, -(-least // count)), most
        most = options.max_pixels or most
        if options.total_pixels is not None:
            most = min(most, options.total_pixels // count)
        least = min(least, most) if options.min_pixels is None else options.min_pixels
        if not unit <= most <= rules.max_pixels or not 0 < least <= most:
            raise ImageError(
                f"min_pixels is {least} and max_pixels {most}; a frame of this model has "
                f"{unit} to {rules.max_pixels} pixels"
            )
        return smart_resize(height, width, replace(rules, min_pixels=least, max_pixels=most))

    def begin(self, _number: int) -> str:
        return ""

    def text(self, times: FrameTimes) -> str:
        seconds = times.seconds
        pairs = images_of(times, self.frames)
        if not self.third:
            return PAD * len(pairs)
        return "".join(
            f"<{(seconds[first] + seconds[last]) / 2:.1f} seconds>{START}{PAD}{END}"
            for first, last in pairs
        )

    def steps(self, times: FrameTimes) -> tuple[int | None, ...]:
        count = len(images_of(times, self.frames))
        if self.third:
            return (None,) * count
        step = np.float32(1.0)
        if self.tokens_per_second is not None:
            # Use float32 as the reference does, because rounding depends on it.
            step = np.float32(self.tokens_per_second) * np.float32(self.frames / times.sampled)
        return tuple((np.arange(count, dtype=np.float32) * step).astype(np.int64).tolist())


def _arange(total: int, count: int) -> tuple[int, ...]:
    """Return `torch.arange(0, total, total / count).int()`, clipped to the last frame."""
    step = total / count
    places = (np.arange(math.ceil(total / step)) * step).astype(np.float32).astype(np.int64)
    return tuple(np.minimum(places, total - 1)[:count].tolist())


def video_resize(count: int, height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    """Return the resized (height, width) of the frames of a video.

    Raises ImageError if the aspect ratio is more than 200.

    rules: its bounds apply to the pixels of all `count` frames together.
    """
    factor = rules.factor
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ImageError(
            f"the video's frames are {width} x {height} px: an aspect ratio beyond 200; crop them"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    even = round(count / 2) * 2
    if even * rows * columns > rules.max_pixels:
        beta = math.sqrt((count * height * width) / rules.max_pixels)
        rows = max(factor, math.floor(height / beta / factor) * factor)
        columns = max(factor, math.floor(width / beta / factor) * factor)
    elif even * rows * columns < rules.min_pixels:
        beta = math.sqrt(rules.min_pixels / (count * height * width))
        rows = math.ceil(height * beta / factor) * factor
        columns = math.ceil(width * beta / factor) * factor
    return rows, columns


def read_video(checkpoint: Checkpoint, variant: Variant, image: ImageRules) -> QwenVideo | None:
    """Read the video preprocessing of a checkpoint, or return None if it is not supported.

    It is not supported if videos are normalized differently from images, or patches do not have two
    frames, because the vision encoder has only one normalization.
    """
    third = variant == "qwen3_vl"
    section, unit = checkpoint.video, image.factor**2
    least, most = (
        (MIN_EDGE, BUDGET_TOKENS * unit) if third else (MIN_TOKENS * unit, FRAME_TOKENS * unit)
    )
    check_made_for(section, patch_size=image.patch, merge_size=image.merge)
    absent = replace(image, min_pixels=least, max_pixels=most)
    if section.data:  # without it, transformers' class takes the image processor's fields
        mean, std = (HALF, HALF) if third else (CLIP_MEAN, CLIP_STD)
        absent = replace(absent, mean=mean, std=std, resample=read_resample(section, 3))
    rules = read_rules(section, absent)
    temporal = section.integer("temporal_patch_size", default=2)
    colours = (rules.mean, rules.std), (image.mean, image.std)
    if colours[0] != colours[1] or (temporal, image.temporal_patch) != (2, 2):
        return None
    given = section.integer("num_frames", default=0)
    vision = checkpoint.config.section("vision_config")
    return QwenVideo(
        rules,
        third,
        fps=section.number("fps", default=2.0),
        num_frames=given or None,
        min_frames=section.integer("min_frames", default=4),
        max_frames=section.integer("max_frames", default=MAX_FRAMES),
        cap=section.flag("cap_pixels_per_frame"),
        max_video_tokens=section.integer(
            "max_video_tokens", default=FRAME_TOKENS if third else 128_000
        ),
        tokens_per_second=vision.number("tokens_per_second", default=4.0)
        if variant == "qwen2_5_vl"
        else None,
        frame_tokens=0 if section.data else FRAME_TOKENS,
    )
