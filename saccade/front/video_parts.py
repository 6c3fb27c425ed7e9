"""Videos as clients send them: a file by URL, upload or base64, or a list of frames.

Options may be inside `video_url`, next to it in the part, or apply to the whole request. This
module has the schemas, and converts parts to `VideoSource`. `unread_fields.py` decides about all
other fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from saccade.core.errors import InvalidRequest
from saccade.core.video import MAX_FRAMES, MIN_FPS, VideoOptions, check_video_options
from saccade.front.breakpoints import MarkedMedia
from saccade.front.fields import FrameCount, Natural, Positive, address, image_url, missing
from saccade.front.unread_fields import IgnoredFields
from saccade.media.sources.source import Address, FileId, VideoSource, source_from_object

Rate = Annotated[float, Meta(ge=MIN_FPS)]
FRAMES = "data:video/jpeg;base64,"
"""Prefix of several JPEG frames in base64, separated by commas. Clients of vLLM send videos in this
form.
"""
VIDEO_OPTIONS = ("fps", "num_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels")
MAX_PARTS = 4 * MAX_FRAMES
"""Maximum number of frames in a list that are inspected."""


class VideoLook(IgnoredFields, kw_only=True):
    """Options for sampling the frames of a video."""

    # frames per second to take; for a list of frames, the rate at which they were taken
    fps: Rate | None = None
    num_frames: FrameCount | None = None  # total frames to take
    max_frames: Positive | None = None  # maximum frames to take
    # pixels of a frame after resizing; if set, they alone determine its size
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    total_pixels: Positive | None = None  # maximum pixels of all frames together


class VideoURL(VideoLook, kw_only=True):
    """A video's URL, or its bytes in base64."""

    url: str
    detail: Literal["auto"] | None = None
    format: str | None = None


class FrameFile(Struct, forbid_unknown_fields=True):
    """The id of an uploaded frame, or of an uploaded video."""

    file_id: str


class MarkedVideo(MarkedMedia, kw_only=True):
    """Options for a video that are next to it in its part, instead of inside its object."""

    fps: Rate | None = None
    num_frames: FrameCount | None = None
    max_frames: Positive | None = None
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    total_pixels: Positive | None = None


class VideoURLPart(MarkedVideo, tag_field="type", tag="video_url", kw_only=True):
    """A part of a message that contains a video."""

    video_url: str | VideoURL


class VideoPart(MarkedVideo, tag_field="type", tag="video", kw_only=True):
    """A video by URL, or a list of frames in order, each a URL or an uploaded file. In Python,
    objects are accepted too.
    """

    video: Any
    """The frames in order, as URLs or ids of uploaded files."""
    frames_indices: list[Natural] | None = None  # index of each frame in the source video
    source_fps: Rate | None = None
    """Frames per second in the source video."""


class InputVideoPart(MarkedVideo, tag_field="type", tag="input_video", kw_only=True):
    """A video by URL, uploaded file, or base64."""

    video_url: str | VideoURL | None = None
    file_id: str | None = None
    video_data: str | None = None
    """The video in base64."""


AnyVideoPart = VideoURLPart | VideoPart | InputVideoPart


class VideoReading(Struct, forbid_unknown_fields=True, kw_only=True):
    """How to sample videos without their own options, and information about frames
    (`media_io_kwargs.video`).
    """

    fps: Rate | None = None
    num_frames: FrameCount | None = None
    frames_indices: list[Natural] | None = None
    total_num_frames: Positive | None = None
    """Total frames in the source video."""
    duration: Rate | None = None
    """The source video's length in seconds."""


class MediaReading(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options for reading videos, in vLLM's field `media_io_kwargs`."""

    video: VideoReading | None = None
    """How to read videos."""


class VideoDefaults(Struct, frozen=True, kw_only=True):
    """The options of a request for all of its videos."""

    sized: bool = False  # the request has a `size` for images, which videos cannot use
    fps: float | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    reading: VideoReading | None = None


NO_VIDEO_DEFAULTS = VideoDefaults()


class Clip(NamedTuple):
    """The video that a part refers to, in whatever format the part has."""

    url: Address | tuple[Address, ...]
    inside: VideoLook | None = None  # the object around the URL
    indices: Sequence[int] = ()  # index of each frame in the source video
    source_fps: float | None = None  # frames per second of the source video


def read_video(part: AnyVideoPart, place: str, defaults: VideoDefaults) -> VideoSource:
    """Convert a video part of any type to a source. Raises InvalidRequest that names the field
    below `place`.
    """
    if defaults.sized:
        raise InvalidRequest(
            "mm_processor_kwargs.size: this applies only to images: for videos, send min_pixels, "
            "max_pixels and total_pixels in mm_processor_kwargs",
            "mm_processor_kwargs.size",
            "unsupported_parameter",
        )
    url, inside, indices, source_fps = _SPELLINGS[type(part)](part, place)
    options = _video_options(inside, part, place, defaults)
    reading = defaults.reading
    if isinstance(url, tuple) and not indices and reading is not None:
        indices, source_fps = reading.frames_indices or (), source_fps or _rate(reading)
    check_video_options(options, place)
    return VideoSource(url, place, options, tuple(indices), source_fps)


def _video_url(part: VideoURLPart, _: str) -> Clip:
    return _linked(part.video_url)


def _video(part: VideoPart, place: str) -> Clip:
    given, where = part.video, f"{place}.video"
    if isinstance(given, str):
        return _linked(given)
    if isinstance(given, dict | FrameFile):
        return Clip(_frame(given, where))
    if not isinstance(given, list | tuple):
        return Clip(source_from_object(given, where).url)
    frames = tuple(_frame(each, f"{where}[{k}]") for k, each in enumerate(given[:MAX_PARTS]))
    if len(given) > MAX_PARTS:
        raise InvalidRequest(
            f"{where}: the video has {len(given)} frames; the limit is {MAX_FRAMES}", where
        )
    return Clip(frames, None, part.frames_indices or (), part.source_fps)


def _input_video(part: InputVideoPart, place: str) -> Clip:
    link = part.video_url
    if part.file_id is None and part.video_data is None and link is not None:
        return _linked(link)
    if isinstance(link, VideoURL):
        raise InvalidRequest(
            (f"{place}: video_url and file_id are mutually exclusive: send one of them"), place
        )
    link = part.video_data if link is None else link
    return Clip(address(part.file_id, link, place, "file_id", "video_url"))


_SPELLINGS: Mapping[type, Callable[[Any, str], Clip]] = {
    VideoURLPart: _video_url,
    VideoPart: _video,
    InputVideoPart: _input_video,
}


def _linked(given: str | VideoURL) -> Clip:
    if isinstance(given, VideoURL):
        return Clip(_one_address(given.url), given)
    return Clip(_one_address(given))


def _one_address(text: str) -> Address | tuple[Address, ...]:
    """Return the URL of a video. If the text contains several frames, return a tuple with the URL
    of each.
    """
    text = text.strip()
    if text[: len(FRAMES)].lower() == FRAMES:
        frames = text[len(FRAMES) :].split(",", MAX_PARTS)
        return tuple(f"data:image/jpeg;base64,{frame}" for frame in frames)
    return image_url(text)


def _frame(given: object, place: str) -> Address:
    match given:
        case str(text):
            return image_url(text)
        case {"file_id": str(id), **others} if not others:
            return FileId(id)
        case {"url": str(text), **others} if not others:
            return image_url(text)
        case {"type": "image_url", "image_url": {"url": str(text)}}:
            return image_url(text)
        case dict():
            raise InvalidRequest(f'{place}: a frame must be a URL, or {{"file_id": ...}}', place)
        case None:
            raise missing(place)
    return source_from_object(given, place).url


def _rate(reading: VideoReading) -> float | None:
    """Return the frame rate of the video that the frames were taken from, or None if the request
    does not specify it.
    """
    if reading.fps is not None:
        return reading.fps
    if reading.total_num_frames is not None and reading.duration is not None:
        return reading.total_num_frames / reading.duration
    return None


def _video_options(
    inside: VideoLook | None, beside: AnyVideoPart, place: str, defaults: VideoDefaults
) -> VideoOptions:
    """Return the options of a video, which may be inside `video_url` or next to it in the part.

    Options that are missing there are the request's. Raises InvalidRequest if the two places
    differ.
    """
    found: dict[str, Any] = {}
    for name in VIDEO_OPTIONS:
        within = None if inside is None else getattr(inside, name)
        own = getattr(beside, name)
        if within is not None and own is not None and within != own:
            raise InvalidRequest(
                f"{place}: {name} is set twice, to {within:g} and as {own:g}", f"{place}.{name}"
            )
        found[name] = own if within is None else within
    paced = found["fps"] is not None or found["num_frames"] is not None
    reading = defaults.reading
    if not paced:
        found["fps"] = defaults.fps or (reading.fps if reading else None)
        found["num_frames"] = defaults.num_frames or (reading.num_frames if reading else None)
    if found["max_pixels"] is None and found["min_pixels"] is None:
        found["max_pixels"], found["min_pixels"] = defaults.max_pixels, defaults.min_pixels
    return VideoOptions(**found)
