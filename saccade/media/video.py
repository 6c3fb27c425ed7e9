"""A video's frames as images: the frames on one canvas, and the canvas's name.

An image with two frames is named by both frames' names. An image with one frame twice has the name
of the frame's still image. Knows nothing of fetching, and leaves a family's decisions to
`core/video.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from blake3 import blake3

from saccade.core.errors import ImageError, InvalidRequest
from saccade.core.extras import ask_operator
from saccade.core.family import FamilySpec
from saccade.core.types import Image, ImageKey
from saccade.core.video import MOST_FRAMES, FrameBudget, FrameTimes, VideoRules, images_of, stacked
from saccade.media.content import Probe
from saccade.media.opened import OpenedImage, OpenedVideo, ReadTimes, SeenFrame
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import VideoSource

PAIR = b"saccade frames\0"
FRAME = b"saccade frame\0"


@cache
def decoder_version() -> str:
    """Return the version of the video reader's distribution, or "" if missing."""
    try:
        return version("av")
    except PackageNotFoundError:
        return ""


def has_decoder() -> bool:
    return bool(decoder_version())


def check_decoder(param: str) -> None:
    """Raise InvalidRequest if the installation lacks a reader for video files."""
    if not has_decoder():
        raise InvalidRequest(
            f"{param}: this server reads no video files: send frames as images, or "
            f"{ask_operator('video')}",
            param,
            "no_video_decoder",
        )


def frame_name(file: bytes, index: int, orientation: int) -> bytes:
    """Name frame `index` in the file with this digest, whose frames are to be turned."""
    turned = b"" if orientation == 1 else bytes([orientation])
    name = FRAME + decoder_version().encode() + b"\0" + file + index.to_bytes(8) + turned
    return blake3(name).digest()


def rules_of(spec: FamilySpec, param: str) -> VideoRules:
    """Return the model's rules for video. Raises InvalidRequest if it takes none."""
    if spec.video is None:
        raise InvalidRequest(
            f"{param}: this model takes no video: send frames of it as images, or ask a model that "
            "does",
            param,
            "no_video",
        )
    return spec.video


def times_of_frames(source: VideoSource, rules: VideoRules) -> FrameTimes:
    """Time a client's own frames. Raises InvalidRequest."""
    assert isinstance(source.url, tuple)
    count, param, indices = len(source.url), source.param, source.indices
    if not 1 <= count <= MOST_FRAMES:
        raise InvalidRequest(
            f"{param}: the video has {count} frames; it may have 1 to {MOST_FRAMES}: send fewer",
            param,
            "too_many_images",
        )
    if not indices:
        fps = source.options.fps or source.source_fps or rules.fps
        return FrameTimes(tuple(range(count)), fps, fps)
    if len(indices) != count or sorted(set(indices)) != list(indices) or indices[0] < 0:
        raise InvalidRequest(
            f"{param}: frames_indices must name a later frame for each of the {count} frames, got "
            f"{len(indices)}",
            f"{param}.frames_indices",
        )
    fps = source.source_fps or source.options.fps or rules.fps
    length = max(1, indices[-1] - indices[0] + 1)
    return FrameTimes(indices, fps, count / length * fps)


def times_of_file(source: VideoSource, probe: Probe, rules: VideoRules) -> FrameTimes:
    """Choose the frames to look at in a file, and their times. Raises InvalidRequest."""
    total, fps = probe.frames or 0, probe.fps
    indices = rules.sample(total, fps, source.options)
    if not 1 <= len(indices) <= MOST_FRAMES:
        raise InvalidRequest(
            f"{source.param}: {len(indices)} frames of the video are wanted; it may have "
            f"{MOST_FRAMES}: ask for fewer (fps, num_frames)",
            source.param,
        )
    return FrameTimes(indices, fps, len(indices) / total * fps)


def check_frames(probes: Sequence[Probe], param: str) -> None:
    """Raise ImageError unless all frames have one size."""
    first = probes[0].upright
    for number, probe in enumerate(probes):
        if probe.upright != first:
            raise ImageError(
                f"frame {number} of the video is {probe.upright[1]} x {probe.upright[0]} px, and "
                f"the first {first[1]} x {first[0]}: send frames of one size",
                param,
            )


def assemble(
    frames: Sequence[SeenFrame],
    times: FrameTimes,
    spec: FamilySpec,
    rules: VideoRules,
    salt: str,
    asker: Requester,
    read: ReadTimes,
    budget: FrameBudget | None,
) -> OpenedVideo:
    """Build the video from its frames, all with one recipe. budget: as `OpenedImage`'s."""
    recipe = frames[0].recipe
    both = stacked(recipe, rules.grid(recipe), rules.frames)
    settings, settings_of_both = spec.settings(recipe), spec.settings(both)
    tokens, patches = spec.num_tokens(recipe.grid), spec.num_patches(recipe.grid)
    images = []
    for places in images_of(times, rules.frames):
        shown = [frames[place] for place in places]
        if len({frame.name for frame in shown}) == 1:
            key = ImageKey(shown[0].name, settings, salt)
            image = Image(key, recipe.grid, tokens, patches, recipe.canvas)
            shown = shown[:1]
        else:
            name = blake3(PAIR + b"".join(frame.name for frame in shown)).digest()
            key = ImageKey(name, settings_of_both, salt)
            image = Image(key, both.grid, tokens, patches, both.canvas)
        images.append(OpenedImage("video", image, tuple(shown), asker, read, budget))
    return OpenedVideo(tuple(images), rules.text(times), rules.steps(times), times)
