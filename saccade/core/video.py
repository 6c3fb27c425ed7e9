"""Videos as sequences of images: which frames to sample, their sizes and times, and the text around
them in the prompt. A model family implements `VideoRules` (`FamilySpec.video`).

In all supported families, a row of an embedding depends only on `VideoRules.frames` consecutive
frames. Each such group of frames is one `Image`, so it is cached like an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from saccade.core.errors import InvalidRequest
from saccade.core.recipe import ImageView, PreprocessParams
from saccade.core.types import Grid

MAX_FRAMES = 768
"""Maximum number of frames sampled from one video."""
MAX_FPS = 10_000.0
"""Maximum frame rate of a video file, in frames per second."""

ALL_FRAMES = -1
"""A value of `num_frames`, as in vLLM: all frames, or those that `fps` samples, up to the model's
maximum.
"""
MIN_FPS = 1e-6
"""Minimum frame rate. With fewer than one frame in eleven days, the times of frames overflow."""


@dataclass(frozen=True, slots=True)
class VideoOptions:
    """A request's options for one video. A field that is None has the model's default."""

    fps: float | None = None  # frames to sample per second, or at which the client sampled them
    num_frames: int | None = None  # frames to sample in total, or ALL_FRAMES
    max_frames: int | None = None  # maximum number of frames, if `fps` is used
    min_pixels: int | None = None  # min_pixels, max_pixels: of each frame after resizing
    max_pixels: int | None = None
    total_pixels: int | None = None  # maximum over all frames


@dataclass(frozen=True, slots=True)
class FrameBudget:
    """The number of frames and the requested limits, from which the size of each frame after
    resizing follows.

    This is part of the protocol with encoder servers, so fields cannot be renamed.
    """

    count: int  # number of frames
    wishes: VideoOptions


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """The indices and rates of a video's sampled frames, from which their times follow."""

    indices: tuple[int, ...]  # frame numbers in the video, one per sampled frame
    fps: float  # frames per second in the video
    sampled: float  # frames sampled per second

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(index / self.fps for index in self.indices)


class VideoRules(Protocol):
    """How a model family processes videos, according to the checkpoint's configuration."""

    @property
    def frames(self) -> int:
        """The number of frames in one image: 2 if a patch covers two frames, else 1."""
        ...

    @property
    def fps(self) -> float:
        """The default number of frames to sample per second."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Placeholders that chat templates may write for a video. The first one found in a prompt
        is used.
        """
        ...

    def sample(self, total: int, fps: float, options: VideoOptions) -> tuple[int, ...]:
        """Return the indices of the frames to sample from a video with `total` frames at `fps`
        frames per second.

        Raises InvalidRequest.
        """
        ...

    def recipe(
        self, count: int, height: int, width: int, options: VideoOptions, /
    ) -> PreprocessParams:
        """Return the preprocessing of each of `count` frames of this size.

        Raises ImageError or InvalidRequest.
        """
        ...

    def grid(self, recipe: PreprocessParams) -> Grid:
        """Return the grid of an image that consists of `frames` different frames, stacked
        vertically.

        recipe: the preprocessing of one frame.
        """
        ...

    def begin(self, number: int) -> str:
        """Return the text before the video with index `number` in the prompt."""
        ...

    def text(self, times: FrameTimes) -> str:
        """Return the text that replaces a video's placeholder. It has one placeholder for each
        image.
        """
        ...

    def steps(self, times: FrameTimes) -> tuple[int | None, ...]:
        """Return `Span.time` for each image of the video."""
        ...


def stacked(recipe: PreprocessParams, grid: Grid, frames: int) -> PreprocessParams:
    """Return parameters that stack `frames` frames vertically into one image."""
    height, width = recipe.canvas
    views = tuple(ImageView((height, width), at=(height * k, 0)) for k in range(frames))
    return PreprocessParams((height * frames, width), grid, views, resample=recipe.resample)


def check_video_options(options: VideoOptions, param: str) -> None:
    """Raise InvalidRequest if options contradict each other or are out of range. param: the video's
    field.
    """
    num_frames = None if options.num_frames == ALL_FRAMES else options.num_frames
    if options.fps is not None and num_frames is not None:
        raise InvalidRequest(
            f"{param}: fps ({options.fps:g}) and num_frames ({num_frames}) are mutually "
            "exclusive: send one of them",
            f"{param}.num_frames",
        )
    if options.fps is not None and options.fps < MIN_FPS:
        raise InvalidRequest(
            f"{param}: fps must be above 0 (at least {MIN_FPS:g}), got {options.fps:g}",
            f"{param}.fps",
        )
    for name, count in (("num_frames", num_frames), ("max_frames", options.max_frames)):
        if count is not None and not 1 <= count <= MAX_FRAMES:
            raise InvalidRequest(
                f"{param}: {name} must be from 1 to {MAX_FRAMES}, got {count}", f"{param}.{name}"
            )


def images_of(times: FrameTimes, frames: int) -> tuple[tuple[int, ...], ...]:
    """Return the frames of each image, as indices in `times.indices`. The last frame may be
    repeated.
    """
    last = len(times.indices) - 1
    return tuple(
        tuple(min(first + k, last) for k in range(frames)) for first in range(0, last + 1, frames)
    )
