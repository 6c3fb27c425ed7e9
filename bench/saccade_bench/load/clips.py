"""Clips for measuring: frames of shapes that move and of a number that counts, as JPEGs or in a
file.

Owns how a clip becomes a part of a message. Knows nothing of data sets or of servers.
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
"""Frames a second of every clip: a second is a pair."""
CODEC = "mpeg4"
"""The past alone decides how it codes a frame, so the start of a longer clip has equal pixels."""


@dataclass(frozen=True, slots=True)
class DrawnClip:
    """Frames of one size, `FPS` a second. `form` file: in an mp4, of which `fps` frames a second
    are wanted.
    """

    frames: tuple[DrawnImage, ...]
    form: VideoForm = "frames"
    fps: float = FPS

    def pieces(self) -> tuple[object, ...]:
        """All that a server can have seen before: pairs of frames, or images."""
        if self.form == "images":
            return self.frames
        return tuple(self.frames[at : at + 2] for at in range(0, len(self.frames), 2))


def clip_parts(
    clip: DrawnClip, url: Callable[[DrawnImage | DrawnClip], str]
) -> list[dict[str, Any]]:
    """The clip in a message. Its frames' size is frozen, or a longer clip's might be another."""
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
    """The clip as an mp4; an odd row or column is cut off. Raises ConfigError without PyAV."""
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
