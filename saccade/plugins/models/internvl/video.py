"""Videos of InternVL checkpoints: each frame is one tile, introduced by a line of text.

Sampling and the prompt follow transformers' InternVL processors, and are tested against them. Does
not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from saccade.core.errors import InvalidRequest
from saccade.core.recipe import PreprocessParams, whole
from saccade.core.types import Grid
from saccade.core.video import MAX_FRAMES, FrameTimes, VideoOptions
from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.config_readers import read_colours
from saccade.plugins.models.internvl.images import TileRules

MARK, CONTENT = "<video>", "<IMG_CONTEXT>"
MIN_FRAMES = 4


@dataclass(frozen=True, slots=True)
class InternVideo:
    """Samples the frames of videos, each of which is one tile. Implements
    `core.video.VideoRules`.
    """

    tiles: TileRules
    fps: float
    num_frames: int | None
    shift: bool | float

    frames = 1
    marks = (MARK,)

    def sample(self, total: int, fps: float, options: VideoOptions) -> tuple[int, ...]:
        """Return the indices of the middle frames of segments of equal length."""
        count = options.num_frames
        if count is None and options.fps is None:
            count = self.num_frames
        if count is None:
            most = min(options.max_frames or MAX_FRAMES, MAX_FRAMES, total)
            least = 1 if options.fps is not None else MIN_FRAMES
            count = min(max(int(total / fps * (options.fps or self.fps)), least), most)
        if count > total:
            raise InvalidRequest(
                f"num_frames: {count} frames were requested, but the video has {total}: request "
                "fewer",
                "num_frames",
            )
        step = total / count
        start = step / 2 if self.shift is True else float(self.shift)
        length = math.ceil((total - start) / step)
        # The reference adds in 64 bits, and rounds to 32 before it truncates.
        places = (start + np.arange(length) * step).astype(np.float32).astype(np.int64)
        return tuple(np.minimum(places, total - 1).tolist())

    def recipe(
        self, _count: int, _height: int, _width: int, _wishes: VideoOptions
    ) -> PreprocessParams:
        side = self.tiles.side
        made = whole((side, side), (1,))
        return PreprocessParams(made.canvas, made.grid, made.views, resample=self.tiles.resample)

    def grid(self, recipe: PreprocessParams) -> Grid:
        return recipe.grid

    def begin(self, _number: int) -> str:
        return ""

    def text(self, times: FrameTimes) -> str:
        return "\n".join(f"Frame{i + 1}: {CONTENT}" for i in range(len(times.indices)))

    def steps(self, times: FrameTimes) -> tuple[int | None, ...]:
        return (None,) * len(times.indices)


def read_video(checkpoint: Checkpoint, tiles: TileRules) -> InternVideo | None:
    """Return the checkpoint's rules for videos.

    Returns `None` if videos are normalized differently from images, or have tiles of another size,
    because the vision encoder supports only one kind of preprocessing.
    """
    section = checkpoint.video
    size = section.section("size")
    sides = {size.integer(name, default=tiles.side) for name in ("height", "width")}
    if sides != {tiles.side} or read_colours(section, *tiles.colours) != tiles.colours:
        return None
    shift = section.get("initial_shift", True)
    return InternVideo(
        tiles,
        fps=section.number("fps", default=2.0),
        num_frames=section.integer("num_frames", default=0) or None,
        shift=shift if isinstance(shift, bool | int | float) else True,
    )
