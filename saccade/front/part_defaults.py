"""A request's fields for all its images, videos and documents.

Owns their schema (`mm_processor_kwargs`), and what parts without wishes of their own get. Knows
nothing of parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from saccade.core.config import PageView
from saccade.front.fields import Positive
from saccade.front.video_parts import NO_DEFAULTS, MediaReading, Rate, VideoDefaults


class ImageLimits(Struct, forbid_unknown_fields=True, kw_only=True):
    """Bounds for a request's images without bounds of their own (`mm_processor_kwargs`), and the
    way to look at its videos. do_sample_frames: true is the rule; a client's frames are not sampled
    again.
    """

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    fps: Rate | None = None
    num_frames: Positive | None = None
    do_sample_frames: Literal[True] | None = None


@dataclass(frozen=True, slots=True)
class PartDefaults:
    """A request's fields for all its images, videos and documents."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    video: VideoDefaults = NO_DEFAULTS
    view: PageView | None = None

    @classmethod
    def of(
        cls, limits: ImageLimits | None, media: MediaReading | None, view: PageView | None = None
    ) -> PartDefaults:
        """Of `mm_processor_kwargs`, `media_io_kwargs` and `saccade.documents`."""
        given = limits or ImageLimits()
        least, most = given.min_pixels, given.max_pixels
        reading = None if media is None else media.video
        video = VideoDefaults(
            fps=given.fps,
            num_frames=given.num_frames,
            min_pixels=least,
            max_pixels=most,
            reading=reading,
        )
        return cls(least, most, video, view)
