"""Video clips for benchmarks: frames with moving shapes and a frame number, sent as JPEGs or in an
mp4 file.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install
from saccade_bench.load.images import DrawnImage, draw
from saccade_bench.options import VideoForm

FPS = 2
"""Frames per second of every clip. The two frames of a second form one temporal patch pair."""
CODEC = "mpeg4"
"""MPEG-4 codes each frame from earlier ones only, so extending a clip keeps its earlier pixels."""


@dataclass(frozen=True, slots=True)
class DrawnClip:
    """Frames of equal size at `FPS` frames per second.

    If `form` is "file", they are sent as an mp4, and the request asks to sample `fps` frames per
    second.
    """

    frames: tuple[DrawnImage, ...]
    form: VideoForm = "frames"
    fps: float = FPS

    def pieces(self) -> tuple[object, ...]:
        """Return everything that a server may have cached: pairs of frames, or single images."""
        if self.form == "images":
            return self.frames
        return tuple(self.frames[at : at + 2] for at in range(0, len(self.frames), 2))


def clip_parts(
    clip: DrawnClip, url: Callable[[DrawnImage | DrawnClip], str]
) -> list[dict[str, Any]]:
    """Return the clip as content parts of a message.

    `max_pixels` fixes the frame size, because servers would shrink the frames of longer clips.
    """
    pixels = clip.frames[0].width * clip.frames[0].height
    if clip.form == "file":
        wishes = {"fps": clip.fps, "max_pixels": pixels}
        return [{"type": "video_url", "video_url": {"url": url(clip), **wishes}}]
    frames = [url(frame) for frame in clip.frames]
    if clip.form == "images":
        return [{"type": "image_url", "image_url": {"url": frame}} for frame in frames]
    return [{"type": "video", "video": frames, "fps": clip.fps, "max_pixels": pixels}]


def clip_url(clip: DrawnClip) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(encode_clip(clip)).decode()}"


def encode_clip(clip: DrawnClip) -> bytes:
    """Encode the clip as an mp4, without the last row or column if their number is odd.

    Raises ConfigError without PyAV.
    """
    if importlib.util.find_spec("av") is None:
        raise ConfigError(f"clips as files need PyAV: {how_to_install('.[video]')}")
    import av

    made = io.BytesIO()
    with av.open(made, "w", format="mp4") as file:
        stream: Any = file.add_stream(CODEC, rate=Fraction(FPS))
        width, height = clip.frames[0].width & ~1, clip.frames[0].height & ~1
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 4 * width * height * FPS
        stream.codec_context.thread_count = 1
        for frame in clip.frames:
            pixels = np.asarray(draw(frame).crop((0, 0, width, height)))
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return made.getvalue()
