"""Converts the frames of a video to images, each with a pair of frames on one canvas, and computes
their hashes.

The hash of an image with two frames is computed from the hashes of the frames. If both frames are
the same, it is the hash of the frame as a still image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blake3 import blake3

from saccade.core.errors import ImageError, InvalidRequest
from saccade.core.extras import ask_operator
from saccade.core.family import FamilySpec
from saccade.core.types import Image, ImageKey
from saccade.core.video import (
    ALL_FRAMES,
    MAX_FPS,
    MAX_FRAMES,
    FrameBudget,
    FrameTimes,
    VideoRules,
    images_of,
    stacked,
)
from saccade.media.content import Probe, video_reader
from saccade.media.opened import CachedFrame, OpenedImage, OpenedVideo, ReadTimes
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import VideoSource

PAIR = b"saccade frames\0"
FRAME = b"saccade frame\0"


def check_decoder(param: str) -> None:
    """Raise InvalidRequest if no reader for video files is installed."""
    if not video_reader():
        raise InvalidRequest(
            f"{param}: this server does not support video files: send frames as images, or "
            f"{ask_operator('video')}",
            param,
            "no_video_decoder",
        )


def frame_name(file: bytes, index: int, orientation: int) -> bytes:
    """Return the hash of frame `index` of a video file.

    file: the digest of the file.
    orientation: the rotation of the frame.
    """
    turned = b"" if orientation == 1 else bytes([orientation])
    name = FRAME + video_reader().encode() + b"\0" + file + index.to_bytes(8) + turned
    return blake3(name).digest()


def rules_of(spec: FamilySpec, param: str) -> VideoRules:
    """Return the model's rules for videos. Raises InvalidRequest if it does not support them."""
    if spec.video is None:
        raise InvalidRequest(
            f"{param}: this model does not support video: send frames as images, or use another "
            "model",
            param,
            "no_video",
        )
    return spec.video


def times_of_frames(source: VideoSource, rules: VideoRules) -> FrameTimes:
    """Return the times of frames that the client has sampled. Raises InvalidRequest."""
    assert isinstance(source.url, tuple)
    count, param, indices = len(source.url), source.param, source.indices
    if not 1 <= count <= MAX_FRAMES:
        raise InvalidRequest(
            f"{param}: the video has {count} frames; the limit is {MAX_FRAMES}: send fewer",
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
    """Choose the frames to decode from a file, and return their times. Raises InvalidRequest."""
    total, fps, options = probe.frames or 0, probe.fps, source.options
    if options.num_frames == ALL_FRAMES:
        options = replace(options, num_frames=None, fps=options.fps or MAX_FPS)
    if options.fps is not None:
        options = replace(options, fps=min(options.fps, MAX_FPS))
    indices = rules.sample(total, fps, options)
    if not 1 <= len(indices) <= MAX_FRAMES:
        raise InvalidRequest(
            f"{source.param}: {len(indices)} frames of the video were requested; the limit is "
            f"{MAX_FRAMES}: request fewer (fps, num_frames)",
            source.param,
        )
    return FrameTimes(indices, fps, len(indices) / total * fps)


def check_frames(probes: Sequence[Probe], param: str) -> None:
    """Raise ImageError unless all frames have the same size."""
    first = probes[0].upright
    for number, probe in enumerate(probes):
        if probe.upright != first:
            raise ImageError(
                f"frame {number} of the video is {probe.upright[1]} x {probe.upright[0]} px, but "
                f"the first one is {first[1]} x {first[0]}: send frames of one size",
                param,
            )


def assemble(
    frames: Sequence[CachedFrame],
    times: FrameTimes,
    spec: FamilySpec,
    rules: VideoRules,
    salt: str,
    requester: Requester,
    read: ReadTimes,
    budget: FrameBudget | None,
) -> OpenedVideo:
    """Build a video from its frames, which all have the same parameters.

    budget: as in `OpenedImage`.
    """
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
        images.append(OpenedImage("video", image, tuple(shown), requester, read, budget))
    return OpenedVideo(tuple(images), rules.text(times), rules.steps(times), times)
