"""Reads video files: `read_metadata` returns the number of frames, their size and the frame rate,
and `decode_frames` decodes frames to RGB pixels. Runs in image workers only. PyAV is in the extra
`video`.

A file is read from memory and cannot open other files. Only the containers and codecs listed in
this module are enabled, which excludes playlists, session descriptions and lists of files. If a
container refers to another file, opening it fails. Decoders start no threads. Frames are indexed in
the order in which they are displayed.

Frames are converted by PyAV's `to_ndarray(format="rgb24")`, as in transformers' `load_video`. Then
they are rotated by the file's display matrix, which players apply but `load_video` ignores. A phone
that is held upright stores frames rotated by 90 degrees.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn, cast

import av
import numpy as np
from av.sidedata.sidedata import Type as SideData
from av.stream import Discard

from saccade.core.video import MAX_FPS
from saccade.media.content import VIDEO, Probe
from saccade.media.reasons import Undecodable, Unreadable

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts"
CODECS = (
    *("h264", "hevc", "vp8", "libvpx", "vp9", "libvpx-vp9", "av1", "libdav1d", "libaom-av1"),
    *("mjpeg", "mpeg4"),
)
MAX_STREAMS = 16
MAX_PACKETS = 1 << 20
"""Maximum packets of all streams together: five hours of video with sound."""
MAX_SECONDS = 24 * 3600.0
MAX_SIDE = 16_384
MAX_UNDECODED = 256
"""Maximum packets to decode until the first frame, because a file may start between key frames."""
SKEW = 50
"""A display matrix counts as a rotation by quarter turns if its two large elements are at least
this many times larger than the others, which allows an error of about one degree.
"""
BROKEN = (av.FFmpegError, ArithmeticError, LookupError, TypeError)
"""The exceptions that PyAV raises for malformed bytes."""
DEFAULT_RATE = 24.0
"""The frame rate of a file that specifies none, as in transformers."""


def read_metadata(data: mmap.mmap, max_pixels: int) -> Probe:
    """Return a video's metadata as a `Probe`. Raises Unreadable.

    max_pixels: the maximum size of a frame.
    """
    with opened(data) as container:
        stream = _video(container)
        height, width = _size(stream, max_pixels)
        shown = len(_times(container, stream))
        seconds = _seconds(container, stream)
        sound = bool(container.streams.audio)
        # Read before the container is closed, which frees its streams.
        rate = stream.average_rate or stream.guessed_rate
        kind = container.format.name.split(",")[0][:16]
        mode = f"{kind} {stream.codec_context.name}"[:16]
    if not shown:
        raise Unreadable("no frames")
    fps = float(rate) if rate else shown / seconds if seconds else DEFAULT_RATE
    if not 0 < fps < MAX_FPS:
        raise Unreadable("frame rate", fps)
    return Probe(VIDEO, height, width, mode, _orientation(data), shown, fps, sound)


def _orientation(data: mmap.mmap) -> int:
    """Return the first frame's EXIF orientation, or 1 if frames cannot be decoded.

    PyAV exposes the container's display matrix only on decoded frames.
    """
    with suppress(Unreadable), opened(data) as container:
        stream = _video(container)
        for number, packet in enumerate(container.demux(stream)):
            if number == MAX_UNDECODED:
                break
            for frame in packet.decode():
                # PyAV's type stubs are too narrow
                side_data = cast("Mapping[Any, Any]", frame.side_data)
                matrix = side_data.get(SideData.DISPLAYMATRIX)
                return 1 if matrix is None else orientation_of(bytes(matrix))
    return 1


def orientation_of(matrix: bytes) -> int:
    """Return the EXIF orientation for a display matrix of quarter turns and flips, or 1 for any
    other matrix.

    The matrix has nine int32 values in row order. A stored point (x, y) is displayed at (ax + cy,
    bx + dy).
    """
    a, b, _, c, d, *_ = struct.unpack("=9i", matrix)
    sideways, straight = min(abs(b), abs(c)), min(abs(a), abs(d))
    if straight > SKEW * max(abs(b), abs(c)):
        return {(True, True): 1, (False, True): 2, (False, False): 3, (True, False): 4}[
            a > 0, d > 0
        ]
    if sideways > SKEW * max(abs(a), abs(d)):
        return {(True, True): 5, (False, True): 6, (False, False): 7, (True, False): 8}[
            c > 0, b > 0
        ]
    return 1


def decode_frames(
    data: mmap.mmap,
    wanted: Sequence[int],
    stored: tuple[int, int],
    take: Callable[[int, np.ndarray], None],
) -> None:
    """Call `take(index, pixels)` for each of the `wanted` frames, in order.

    Pixels are uint8 RGB [height, width, 3], not rotated. Raises Undecodable if a frame is missing
    or has another size.

    stored: the (height, width) of the frames.
    """
    left = sorted(set(wanted))
    with opened(data, Undecodable) as container:
        stream = _video(container)
        times = _times(container, stream)
        if left and left[-1] >= len(times):
            raise Undecodable("frame beyond", left[-1], len(times))
        keys = _keys(times)
        numbers = {time: number for number, (time, _) in enumerate(times)}
        # A transport stream has no index, so seeking in it can end after the wanted frame.
        while left and container.format.name != "mpegts":
            key = max((each for each in keys if each <= left[0]), default=0)
            container.seek(times[key][0], backward=True, any_frame=False, stream=stream)
            _decode_requested(container, stream, numbers, left, keys, stored, take)
    if left:
        with opened(data, Undecodable) as container:
            _decode_requested(container, _video(container), numbers, left, (), stored, take)


def _decode_requested(
    container: InputContainer,
    stream: VideoStream,
    numbers: Mapping[int, int],
    left: list[int],
    keys: Sequence[int],
    stored: tuple[int, int],
    take: Callable[[int, np.ndarray], None],
) -> None:
    """Decode from the current position, and pass the frames in `left` to `take`.

    These frames are removed from `left`. Returns early if seeking to one of `keys` is a shortcut to
    the next frame.
    """
    for frame in container.decode(stream):
        number = -1 if frame.pts is None else numbers.get(frame.pts, -1)
        if number > left[0]:
            break
        if number < left[0]:
            continue
        if (frame.height, frame.width) != stored:
            raise Undecodable("frames change size", frame.width, frame.height)
        take(left.pop(0), frame.to_ndarray(format="rgb24", threads=1))
        if not left or max((key for key in keys if key <= left[0]), default=0) > number:
            return
    raise Undecodable("frame missing", left[0])


@contextmanager
def opened(
    data: mmap.mmap, error: type[Unreadable | Undecodable] = Unreadable
) -> Iterator[InputContainer]:
    """Open a container, and close it on exit. Errors about malformed bytes are raised as
    `error`.
    """
    options = {
        "format_whitelist": CONTAINERS,
        "codec_whitelist": ",".join(CODECS),
        "protocol_whitelist": "",
        "max_streams": str(MAX_STREAMS),
    }
    data.seek(0)
    try:
        container = av.open(data, "r", options=options, io_open=_refuse)
    except MemoryError:
        raise
    except (*BROKEN, ValueError, OSError) as why:
        raise error("no video here") from why
    try:
        yield container
    except MemoryError:
        raise
    except BROKEN as why:
        raise error("damaged video") from why
    finally:
        container.close()


def _refuse(*_: Any) -> NoReturn:
    raise PermissionError("a video may not name other files")


def _video(container: InputContainer) -> VideoStream:
    if len(container.streams) > MAX_STREAMS:
        raise Unreadable("streams", len(container.streams), MAX_STREAMS)
    if not container.streams.video:
        raise Unreadable("no video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None or stream.codec_context.name not in CODECS:
        raise Unreadable("codec")
    stream.codec_context.thread_count = 1
    stream.thread_type = "NONE"
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all
    return stream


def _size(stream: VideoStream, max_pixels: int) -> tuple[int, int]:
    height, width = stream.codec_context.height, stream.codec_context.width
    if min(height, width) < 1 or height * width > max_pixels or max(height, width) > MAX_SIDE:
        raise Unreadable("frame size", width, height, MAX_SIDE, max_pixels / 1e6)
    return height, width


def _seconds(container: InputContainer, stream: VideoStream) -> float:
    seconds = 0.0
    if stream.duration and stream.time_base:
        seconds = float(stream.duration * stream.time_base)
    elif container.duration:
        seconds = container.duration / 1e6
    if not math.isfinite(seconds) or abs(seconds) > MAX_SECONDS:
        raise Unreadable("length", seconds, MAX_SECONDS / 3600)
    return max(seconds, 0.0)


def _times(container: InputContainer, stream: VideoStream) -> list[tuple[int, bool]]:
    """Return each frame's timestamp in display order, and True if it is a key frame.

    This only reads packets and decodes no frame. Raises Unreadable if there are too many packets.
    """
    found: dict[int, bool] = {}
    for number, packet in enumerate(container.demux(stream)):
        if number > MAX_PACKETS:
            raise Unreadable("packets", MAX_PACKETS)
        time = packet.dts if packet.pts is None else packet.pts
        if packet.size and time is not None and not packet.is_discard:
            found[time] = packet.is_keyframe
    return sorted(found.items())


def _keys(times: Sequence[tuple[int, bool]]) -> list[int]:
    return [number for number, (_, is_key) in enumerate(times) if is_key]


def warm_up() -> None:
    """Decode a tiny video, so that the libraries load everything that they need."""
    made = io.BytesIO()
    with av.open(made, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(4))
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(2):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    clip = made.getvalue()
    with mmap.mmap(-1, len(clip)) as data:
        data.write(clip)
        read_metadata(data, 32 * 32)
        decode_frames(data, [0, 1], (32, 32), lambda *_: None)
