"""Made video files. Shared by tests."""

from __future__ import annotations

import io
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np


@cache
def clip(
    frames: int = 48,
    codec: str = "libx264",
    container: str = "mp4",
    size: tuple[int, int] = (96, 64),
    fps: int = 8,
    keyframes: int = 12,
    sound: bool = False,
    turned: tuple[int, bool, bool] | None = None,
) -> bytes:
    """A noisy field that moves; each frame has a square of its own brightness in its stored top
    left corner. sound: there is a stream of it, silent. turned: what a player is asked for, degrees
    and flips.
    """
    made, rng = io.BytesIO(), np.random.default_rng(0)
    field = rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    with av.open(made, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=Fraction(fps))
        stream.width, stream.height = size
        stream.pix_fmt, stream.gop_size = "yuv420p", keyframes
        stream.codec_context.thread_count = 1
        if turned is not None:
            stream.set_display_rotation(*turned)
        heard: Any = file.add_stream("aac", rate=8000) if sound else None
        for number in range(frames):
            pixels = np.roll(field, 2 * number, axis=1)
            pixels[:16, :16] = 4 * number % 256
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
        if heard:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            silence.sample_rate = 8000
            file.mux([*heard.encode(silence), *heard.encode()])
    return made.getvalue()


def shown(data: bytes) -> list[np.ndarray]:
    """All frames, as transformers' `load_video` has them with PyAV."""
    with av.open(io.BytesIO(data), "r") as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
