"""A video as a row of images: the frames looked at, their size, their times, and the prompt's words
for them. `VideoRules` is a model family's answer (`FamilySpec.video`).

In every served family, a tower's rows depend on `frames` neighbouring frames alone, so such frames
are one `Image`, which costs its work once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from saccade.core.errors import InvalidRequest
from saccade.core.recipe import ImageView, PreprocessParams
from saccade.core.types import Grid

MAX_FRAMES = 768
"""Of one video, whoever asks for more."""
MAX_FPS = 10_000.0
"""Frames a second of any file: as many as may be looked at."""

ALL_FRAMES = -1
"""As `num_frames`, which is vLLM's spelling: all frames, or those that `fps` samples, up to the
model's maximum.
"""
MIN_FPS = 1e-6
"""A frame in eleven days: with less, times of frames overflow."""


@dataclass(frozen=True, slots=True)
class VideoOptions:
    """A request's options for one video. None: as in the model's own configuration.

    fps: frames to look at for each second; for frames sampled by the client, frames as taken.
    num_frames: frames altogether, or ALL_FRAMES. max_frames: at most, if `fps` decides. min_pixels,
    max_pixels: for each frame after resizing. total_pixels: over all frames.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class FrameBudget:
    """What decides a frame's size apart from its own: the number of frames, and options.

    Encoders receive these fields, so their names stay.
    """

    count: int
    wishes: VideoOptions


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """When frames were taken. Frame `indices[k]` belongs to a video with `fps` frames per second.

    sampled: chosen frames per second.
    """

    indices: tuple[int, ...]
    fps: float
    sampled: float

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(index / self.fps for index in self.indices)


class VideoRules(Protocol):
    """One family's videos, from its checkpoint's own configuration."""

    @property
    def frames(self) -> int:
        """Return the frames in one image: 2 if a row of patches covers two frames, else 1."""
        ...

    @property
    def fps(self) -> float:
        """Return the default frames for each second."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that chat templates write for a video. The first present counts."""
        ...

    def sample(self, total: int, fps: float, options: VideoOptions) -> tuple[int, ...]:
        """Choose the frames to look at in a file with `total` frames, `fps` a second.

        Raises InvalidRequest.
        """
        ...

    def recipe(
        self, count: int, height: int, width: int, options: VideoOptions, /
    ) -> PreprocessParams:
        """Return the recipe for each of `count` frames with the given size.

        Raises ImageError or InvalidRequest.
        """
        ...

    def grid(self, recipe: PreprocessParams) -> Grid:
        """Return the grid for `frames` different frames with one recipe, one below another."""
        ...

    def begin(self, number: int) -> str:
        """Return the text before the prompt's video with this number."""
        ...

    def text(self, times: FrameTimes) -> str:
        """Return the prompt text for the mark, with one placeholder for each image."""
        ...

    def steps(self, times: FrameTimes) -> tuple[int | None, ...]:
        """Return `Span.time` for each image."""
        ...


def stacked(recipe: PreprocessParams, grid: Grid, frames: int) -> PreprocessParams:
    """Return a recipe that stacks several frames on one canvas, one below another."""
    height, width = recipe.canvas
    views = tuple(ImageView((height, width), at=(height * k, 0)) for k in range(frames))
    return PreprocessParams((height * frames, width), grid, views, resample=recipe.resample)


def check_video_options(options: VideoOptions, param: str) -> None:
    """Raise InvalidRequest for contradictory or unreasonable options."""
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
    """Return each image's frames as places in `times.indices`. The last frame is repeated."""
    last = len(times.indices) - 1
    return tuple(
        tuple(min(first + k, last) for k in range(frames)) for first in range(0, last + 1, frames)
    )
