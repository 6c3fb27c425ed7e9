"""Video files made to harm: no path and no socket is opened, no limit of a worker is passed, each
answer is typed, and the next file is read.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path as Folder

import pytest

from saccade.core.errors import RequestError
from saccade.media.formats.container import opened as opened_container
from saccade.media.reasons import Undecodable
from tests.media.clips import clip
from tests.media.conftest import MakePath
from tests.media.test_video import decode, opened


def with_bytes(data: bytes, after: bytes, offset: int, new: bytes) -> bytes:
    """`new` in place of what stands `offset` bytes behind the name of a box."""
    at = data.index(after) + 4 + offset
    return data[:at] + new + data[at + len(new) :]


def of_many_streams() -> bytes:
    """A file whose one track is there two thousand times."""
    data = clip()
    moov = data.index(b"moov") - 4
    assert moov + struct.unpack(">I", data[moov : moov + 4])[0] == len(data), "it stands last"
    track = data.index(b"trak") - 4
    (length,) = struct.unpack(">I", data[track : track + 4])
    more = data[track : track + length] * 2000
    size = struct.pack(">I", len(data) - moov + len(more))
    return data[:moov] + size + data[moov + 4 : track] + more + data[track:]


MADE: dict[str, Callable[[], bytes]] = {
    "65,535 x 65,535": lambda: with_bytes(clip(), b"avc1", 24, b"\xff" * 4),
    "a track of 65,535 x 65,535": lambda: with_bytes(clip(codec="mpeg4"), b"mp4v", 24, b"\xff" * 4),
    "a billion frames": lambda: with_bytes(
        clip(), b"stsz", 4, struct.pack(">II", 1, 1_000_000_000)
    ),
    "a billion durations": lambda: with_bytes(
        clip(), b"stts", 4, struct.pack(">III", 1, 1_000_000_000, 1)
    ),
    "a billion runs of durations": lambda: with_bytes(
        clip(), b"stts", 4, struct.pack(">I", 1_000_000_000)
    ),
    "times that stand still": lambda: with_bytes(clip(), b"stts", 4, struct.pack(">III", 1, 48, 0)),
    "a time scale of nothing": lambda: with_bytes(clip(), b"mdhd", 12, bytes(4)),
    "a duration of years": lambda: with_bytes(clip(), b"mdhd", 16, b"\x7f" + b"\xff" * 3),
    "two thousand streams": of_many_streams,
    "another size in mid-stream": lambda: (
        clip(container="mpegts") + clip(container="mpegts", size=(64, 96))
    ),
    "another codec in mid-stream": lambda: (
        clip(container="mpegts") + clip(codec="mpeg4", container="mpegts")
    ),
    "data elsewhere": lambda: with_bytes(clip(), b"url ", 0, bytes(4)),
    "a box larger than the file": lambda: with_bytes(clip(), b"ftyp", -8, b"\x7f\xff\xff\xff"),
    "boxes in boxes": lambda: b"".join(
        struct.pack(">I4s", 8 * (4000 - k), b"moov") for k in range(4000)
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("name", MADE)
async def test_a_file_made_to_harm_is_a_typed_answer_and_the_next_is_read(
    media_path: MakePath, name: str
) -> None:
    data = MADE[name]()
    async with media_path(decode_timeout=5.0) as path:
        try:
            video = await opened(path, data, fps=2)
            assert len(video.images) <= 384
            canvases = await decode(path, video)
            assert {canvas.shape[2] for canvas in canvases} == {3}
        except RequestError as error:
            assert error.status == 400, error
            assert error.message
        assert len(await decode(path, await opened(path, clip(), fps=2))) == 6


HEADS = {
    "bare": b"",
    "mp4": clip()[:36],
    "webm": b"\x1a\x45\xdf\xa3",
    "ts": b"\x47" + b"\xff" * 187,
}


@pytest.mark.parametrize("head", HEADS)
def test_lists_of_other_files_open_no_path_and_no_socket(
    tmp_path: Folder, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """Without a sandbox around it: FFmpeg itself is asked for nothing else."""
    (tmp_path / "other.mp4").write_bytes(clip())
    os.mkfifo(tmp_path / "pipe.mp4")  # whoever opens it waits
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x.mp4"
        server.settimeout(0.0)
        lists = [
            f"{begin}{target}{end}"
            for target in ("other.mp4", "pipe.mp4", f"file://{tmp_path}/pipe.mp4", url)
            for begin, end in (
                ("ffconcat version 1.0\nfile ", "\n"),
                ("#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n", "\n#EXT-X-ENDLIST\n"),
                (
                    '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
                    'mediaPresentationDuration="PT9S"><Period><AdaptationSet contentType="video">'
                    '<Representation id="1" bandwidth="1"><BaseURL>',
                    "</BaseURL></Representation></AdaptationSet></Period></MPD>",
                ),
                ("", ""),
            )
        ]
        lists.append("v=0\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n")
        lists.append("%03d.jpg")
        before = len(list(Folder("/proc/self/fd").iterdir()))
        assert [packets(HEADS[head] + text.encode()) for text in lists] == [0] * len(lists)
        assert len(list(Folder("/proc/self/fd").iterdir())) == before
        with pytest.raises(BlockingIOError):
            server.accept()


def packets(data: bytes) -> int:
    """Of video that FFmpeg finds behind these bytes."""
    found = 0
    with mmap.mmap(-1, len(data)) as held:
        held.write(data)
        with suppress(ValueError), opened_container(held, Undecodable) as container:
            for _ in container.demux(*container.streams.video[:1]):
                found += 1
    return found
