"""Video files in image workers: the frames are PyAV's, a seen file is not opened again, and what is
hostile or broken is a typed error and no more.
"""

from __future__ import annotations

import asyncio
import io
import random
import struct
from pathlib import Path as Folder

import av
import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from blake3 import blake3

from saccade.core.errors import ImageError, InvalidRequest, RequestError
from saccade.core.plan import PixelSlot
from saccade.core.video import ALL_FRAMES, VideoOptions
from saccade.media.content import PixelNames, video_reader
from saccade.media.formats.container import orientation_of
from saccade.media.opened import OpenedVideo
from saccade.media.sources.source import ImageSource, VideoSource
from saccade.plugins.video import frames as media_video
from saccade.plugins.video.frames import FRAME
from tests.media.clips import clip, shown
from tests.media.conftest import MakePath, Path
from tests.media.pictures import encode, resized

MATRICES = {
    1: (1, 0, 0, 1),
    2: (-1, 0, 0, 1),
    3: (-1, 0, 0, -1),
    4: (1, 0, 0, -1),
    5: (0, 1, 1, 0),
    6: (0, 1, -1, 0),
    7: (0, -1, -1, 0),
    8: (0, -1, 1, 0),
}
FRAMES = "saccade_video_frames_decoded_total"
HEADERS = "saccade_headers_read_total"
RESTARTS = "saccade_image_worker_restarts_total"


async def opened(path: Path, data: bytes, **options: float) -> OpenedVideo:
    source = VideoSource(data, "here", VideoOptions(**options))  # type: ignore[arg-type]
    (found,) = await path.media.open_all([source], "")
    assert isinstance(found, OpenedVideo)
    return found


async def decode(path: Path, video: OpenedVideo) -> list[np.ndarray]:
    """The canvas of each image."""
    slots, offset = [], 0
    for image in video.images:
        path.media.hold_image(image)
        slots.append(PixelSlot(offset, *image.image.canvas))
        offset += slots[-1].nbytes
    try:
        work = zip(video.images, slots, strict=True)
        await asyncio.gather(*(path.media.decode(each.image.key, slot) for each, slot in work))
        return [path.arena.view(slot).copy() for slot in slots]
    finally:
        for image in video.images:
            path.media.release_image(image)


@pytest.mark.more
@pytest.mark.parametrize(
    ("codec", "container"),
    [
        ("libx264", "mp4"),
        ("libx264", "mpegts"),
        ("libvpx-vp9", "webm"),
        *(
            pytest.param(codec, container, marks=pytest.mark.slow)
            for codec, container in (
                ("libx264", "matroska"),
                ("libx265", "mp4"),
                ("libvpx", "webm"),
                ("mpeg4", "avi"),
            )
        ),
    ],
)
async def test_frames_of_a_file_are_pyavs_frames(
    media_path: MakePath, codec: str, container: str
) -> None:
    data = clip(codec=codec, container=container)
    frames = shown(data)
    async with media_path() as path:
        video = await opened(path, data, fps=4)
        assert video.times.indices == tuple(range(0, 48, 2))
        canvases = await decode(path, video)
        for number, canvas in enumerate(canvases):
            pair = [frames[4 * number], frames[4 * number + 2]]
            size = canvas.shape[0] // 2, canvas.shape[1]
            assert np.array_equal(canvas, np.concatenate([resized(p, size) for p in pair]))
        assert path.metrics.value(FRAMES) == 24
        again = await opened(path, data, fps=4)
        assert [each.image for each in again.images] == [each.image for each in video.images]
        assert path.metrics.value(HEADERS) == 1, "a seen file is not opened"


@pytest.mark.parametrize(
    "options", [*({"fps": fps} for fps in (24, 241, 1e4, 1e300)), {"num_frames": ALL_FRAMES}]
)
async def test_a_rate_above_the_files_takes_all_frames(
    media_path: MakePath, options: dict[str, float]
) -> None:
    async with media_path() as path:
        video = await opened(path, clip(8), **options)
        assert video.times.indices == tuple(range(8))


async def test_of_all_frames_a_rate_takes_its_share(media_path: MakePath) -> None:
    async with media_path() as path:
        video = await opened(path, clip(8), num_frames=ALL_FRAMES, fps=4)
        assert video.times.indices == (await opened(path, clip(8), fps=4)).times.indices
        assert len(video.times.indices) == 4


@pytest.mark.parametrize("container", ["mp4", pytest.param("matroska", marks=pytest.mark.more)])
@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
async def test_a_video_is_turned_as_its_file_asks(
    media_path: MakePath, quarters: int, container: str
) -> None:
    """As players do. The turn is the one that PyAV tells, counted against the clock."""
    data = clip(8, container=container, turned=(90 * quarters, False, False))
    with av.open(io.BytesIO(data), "r") as file:
        stored = [*file.decode(video=0)]
    turns = [
        np.rot90(pixels, frame.rotation // 90).copy()
        for pixels, frame in zip(shown(data), stored, strict=True)
    ]
    assert turns[0].shape[:2] == ((96, 64) if quarters % 2 else (64, 96))
    async with media_path() as path:
        video = await opened(path, data, fps=8)
        assert video.images[0].frames[0].probe.upright == turns[0].shape[:2]
        for number, canvas in enumerate(await decode(path, video)):
            pair, size = turns[2 * number : 2 * number + 2], (len(canvas) // 2, canvas.shape[1])
            assert np.array_equal(canvas, np.concatenate([resized(p, size) for p in pair]))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_display_matrix_is_an_orientation(orientation: int) -> None:
    """Where each corner of an image comes to lie: as EXIF's number says, to Pillow."""
    a, b, c, d = MATRICES[orientation]
    matrix = struct.pack("=9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 64 << 16, 48 << 16, 1)
    assert orientation_of(matrix) == orientation
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    corners = PIL.Image.fromarray(np.array([[1, 2, 3], [4, 5, 6]], np.uint8))
    corners.info["exif"] = exif.tobytes()
    shown = np.asarray(PIL.ImageOps.exif_transpose(corners))
    places = {(a * x + c * y, b * x + d * y): 1 + x + 3 * y for x in range(3) for y in range(2)}
    assert [places[x, y] for y, x in sorted((y, x) for x, y in places)] == shown.ravel().tolist()


@pytest.mark.parametrize("matrix", [(0, 0, 0, 0), (1, 1, -1, 1), (7, 3, -3, 7), (1, 0, 0, 0)])
def test_a_turn_by_another_angle_is_left_alone(matrix: tuple[int, ...]) -> None:
    a, b, c, d = matrix
    assert orientation_of(struct.pack("=9i", a, b, 0, c, d, 0, 0, 0, 1)) == 1


def test_a_turned_file_has_other_names_than_its_frames_as_stored() -> None:
    """What a server kept on disk of frames that lay on their side is not taken for these."""
    names = {media_video.frame_name(b"file", 3, orientation) for orientation in range(1, 9)}
    before = FRAME + video_reader().encode() + b"\0file" + (3).to_bytes(8)
    assert len(names) == 8
    assert media_video.frame_name(b"file", 3, 1) == blake3(before).digest()


async def test_two_samplings_of_a_file_share_the_pairs_of_both(media_path: MakePath) -> None:
    async with media_path() as path:
        whole = await opened(path, clip(), fps=8, max_pixels=64 * 96)
        few = await opened(path, clip(), num_frames=48, max_pixels=64 * 96)
        keys = {each.image.key for each in whole.images}
        assert {each.image.key for each in few.images} == keys


async def test_a_seen_file_is_not_opened_after_a_restart(
    media_path: MakePath, tmp_path: Folder
) -> None:
    async with media_path(metadata_folder=tmp_path / "cards") as path:
        first = await opened(path, clip(), fps=4)
        assert path.metrics.value(HEADERS) == 1
    async with media_path(metadata_folder=tmp_path / "cards") as path:
        again = await opened(path, clip(), fps=4)
        assert [each.image for each in again.images] == [each.image for each in first.images]
        assert path.metrics.value(HEADERS) == 0, "the metadata says all"
        assert len(await decode(path, again)) == 12
    async with media_path(metadata_folder=tmp_path / "cards", max_image_pixels=1000) as path:
        with pytest.raises(ImageError, match="96 x 64"):
            await opened(path, clip(), fps=4)


HOSTILE = {
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "description": b"v=0\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
    "manifest": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>',
    "junk": b"\0" * 4000,
    "an image": encode(np.zeros((8, 8, 3), np.uint8)),
    "a bare head": clip()[:64],
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_no_video_opens_nothing(media_path: MakePath, name: str) -> None:
    async with media_path() as path:
        with pytest.raises(ImageError) as refused:
            await opened(path, HOSTILE[name])
        assert "video" in refused.value.message and refused.value.param == "here"
        assert path.metrics.value(RESTARTS) == 0


@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=pytest.mark.slow)])
async def test_broken_files_are_typed_errors_and_the_next_is_read(
    media_path: MakePath, times: int
) -> None:
    data, rng = clip(), random.Random(0)
    async with media_path(decode_timeout=5.0) as path:
        for number in range(times):
            broken = bytearray(data)
            if number % 3 == 0:
                del broken[rng.randrange(len(broken)) :]
            for _ in range(rng.randrange(1, 40)):
                if broken:
                    broken[rng.randrange(len(broken))] = rng.randrange(256)
            try:
                await decode(path, await opened(path, bytes(broken), fps=2))
            except RequestError as error:
                assert error.status == 400, error
        assert len(await decode(path, await opened(path, data, fps=2))) == 6


async def test_without_pyav_a_file_is_refused_by_the_extras_name(
    media_path: MakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_video, "video_reader", lambda: "")
    async with media_path() as path:
        with pytest.raises(InvalidRequest, match=r"operator.*scripts/install\.py '\.\[video\]'"):
            await opened(path, clip())
        image = ImageSource(encode(np.zeros((64, 64, 3), np.uint8)), "there")
        assert await path.media.open(image, "")


async def test_frames_that_come_along_take_no_task_each(
    media_path: MakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seen video of 768 frames is one task, and its headers are not read again."""
    frames = tuple(encode(np.full((64, 64, 3), k % 251, np.uint8)) for k in range(768))
    source = VideoSource(frames, "here", VideoOptions(fps=2))
    async with media_path() as path:
        (first,) = await path.media.open_all([source], "")
        headers = path.metrics.value(HEADERS)
        assert headers == len(set(frames))
        made, create = [], asyncio.create_task
        monkeypatch.setattr(
            asyncio, "create_task", lambda work, **more: made.append(work) or create(work)
        )
        (again,) = await path.media.open_all([source], "")
        monkeypatch.undo()
        assert len(made) == 1 and path.metrics.value(HEADERS) == headers
        assert isinstance(first, OpenedVideo) and isinstance(again, OpenedVideo)
        assert [each.image for each in again.images] == [each.image for each in first.images]
        assert len(again.images) == 384


async def test_pixels_have_one_name_whatever_file_they_come_from(media_path: MakePath) -> None:
    """Of the same frames in two files, and of a frame shown twice and its still image."""
    still = np.full((64, 64, 3), 90, np.uint8)
    png, jpeg = encode(still), encode(still, "BMP")

    async def names(path: Path, *frames: bytes) -> list[PixelNames]:
        (video,) = await path.media.open_all([VideoSource(frames, "here", VideoOptions(fps=2))], "")
        found = []
        for image in video.images:
            path.media.hold_image(image)
            slot = PixelSlot(0, *image.image.canvas)
            found.append(await path.media.decode(image.image.key, slot))
            path.media.release_image(image)
        return found

    async with media_path() as path:
        assert png != jpeg
        one, two = await names(path, png, png), await names(path, png, jpeg)
        assert one == two and len(one) == 1, "a frame twice is the still image"
        other = encode(np.full((64, 64, 3), 91, np.uint8))
        assert await names(path, png, other) == await names(path, jpeg, other) != one
        still_image = await path.media.open(ImageSource(png, "there"), "")
        path.media.hold_image(still_image)
        slot = PixelSlot(0, *still_image.image.canvas)
        assert await path.media.decode(still_image.image.key, slot) == one[0]
        path.media.release_image(still_image)
