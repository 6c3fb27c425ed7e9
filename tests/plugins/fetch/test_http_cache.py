"""Images behind URLs: answered as their servers have them now, and fetched no more than needed."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import pytest

from saccade.core.errors import ImageError, TooLarge
from saccade.plugins.fetch.content_coding import PIECE, ContentDecoder
from saccade.plugins.fetch.fetcher import Fetcher
from tests.media.origins import PICTURE, Origin, fetcher, origin

OLD, NEW = PICTURE, PICTURE[::-1]
DAY = 86_400


def date(ago: float = 0.0) -> str:
    return formatdate(time.time() - ago, usegmt=True)


class Replaced:
    """Answers with an image that is replaced by another. `headers` are the old one's, a date as
    (seconds ago); a matching validator is answered by 304.
    """

    def __init__(self, *headers: str, confirmed: tuple[str, ...] = ()) -> None:
        self.headers = headers
        self.confirmed = confirmed
        self.replaced = False
        self.server: Origin | None = None
        self.statuses: list[int] = []

    async def answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        assert self.server is not None
        asked = dict(
            line.lower().split(": ", 1)
            for line in self.server.requests[-1].splitlines()[1:]
            if line
        )
        told = dict(line.split(": ", 1) for line in self.headers)
        validators = {
            "if-none-match": told.get("ETag", "none").lower(),
            "if-modified-since": told.get("Last-Modified", "none").lower(),
        }
        same = [asked[name] == value for name, value in validators.items() if name in asked]
        if not self.replaced and same and all(same):
            self.statuses.append(304)
            send(writer, "304 Not Modified", b"", *(self.confirmed or self.headers))
            return
        self.statuses.append(200)
        later = (line for line in self.headers if line[:5] not in ("ETag:", "Last-"))
        if self.replaced:
            send(writer, "200 OK", NEW, *later, 'ETag: "new"', f"Last-Modified: {date()}")
        else:
            send(writer, "200 OK", OLD, *self.headers)


def send(writer: asyncio.StreamWriter, status: str, body: bytes, *headers: str) -> None:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


def ask_three_times(made: Replaced, salt: str = "") -> list[bytes]:
    """Twice before the image is replaced, and once after."""

    async def scenario() -> list[bytes]:
        async with origin(made.answer) as server, fetcher() as (fetch, _):
            made.server = server
            found = [await fetch.fetch(server.url + "/a.png", salt) for _ in range(2)]
            made.replaced = True
            return [*found, await fetch.fetch(server.url + "/a.png", salt)]

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("headers", "statuses"),
    [
        # as nginx, object stores and python's http.server send them: no word about freshness
        (('ETag: "old"', f"Last-Modified: {date(10 * DAY)}"), [200, 304, 200]),
        (('ETag: W/"old"', f"Last-Modified: {date(365 * DAY)}"), [200, 304, 200]),
        (('ETag: "old"', "Cache-Control: public"), [200, 304, 200]),
        (('ETag: "old"', "Cache-Control: immutable"), [200, 304, 200]),
        ((f"Last-Modified: {date(600)}", f"Date: {date()}"), [200, 304, 200]),
        ((f"Last-Modified: {date(10 * DAY)}", "Vary: Accept"), [200, 304, 200]),
        (("Content-Type: image/png",), [200, 200, 200]),
        # changed in the second of the answer: the date of change does not tell contents apart
        ((f"Last-Modified: {date()}", f"Date: {date()}"), [200, 200, 200]),
        # freshness that has passed, or makes no sense
        (("Cache-Control: max-age=0", 'ETag: "old"'), [200, 304, 200]),
        (("Cache-Control: must-revalidate", 'ETag: "old"'), [200, 304, 200]),
        (("Cache-Control: max-age=soon", 'ETag: "old"'), [200, 304, 200]),
        (("Cache-Control: max-age=0, max-age=600", 'ETag: "old"'), [200, 304, 200]),
        (("Cache-Control: max-age=600, s-maxage=0", 'ETag: "old"'), [200, 304, 200]),
        (("Cache-Control: no-cache, max-age=600", 'ETag: "old"'), [200, 304, 200]),
        (("Expires: 0", 'ETag: "old"'), [200, 304, 200]),
        ((f"Expires: {date(DAY)}", f"Date: {date()}", 'ETag: "old"'), [200, 304, 200]),
        ((f"Expires: {date(-DAY)}", f"Date: {date(-DAY)}", 'ETag: "old"'), [200, 304, 200]),
        (("Age: 600", "Cache-Control: max-age=600", 'ETag: "old"'), [200, 304, 200]),
        ((f"Date: {date(DAY)}", "Cache-Control: max-age=600", 'ETag: "old"'), [200, 304, 200]),
        (("Cache-Control: max-age=600", "Vary: *", 'ETag: "old"'), [200, 304, 200]),
        (("Cache-Control: no-store", 'ETag: "old"'), [200, 200, 200]),
    ],
)
def test_a_replaced_image_is_seen_at_once(headers: tuple[str, ...], statuses: list[int]) -> None:
    made = Replaced(*headers)
    assert ask_three_times(made) == [OLD, OLD, NEW]
    assert made.statuses == statuses


@pytest.mark.parametrize(
    "headers",
    [
        ("Cache-Control: max-age=600",),
        ("Cache-Control: max-age=1, s-maxage=600",),
        ("Cache-Control: max-age=600, immutable", "Age: 60"),
        (f"Expires: {date(-DAY)}", f"Date: {date()}"),
        (f"Expires: {date(-DAY)}",),
        ("Cache-Control: max-age=600", f"Date: {date(-DAY)}"),  # a clock that is a day ahead
    ],
)
def test_an_image_is_fresh_for_as_long_as_its_server_says(headers: tuple[str, ...]) -> None:
    made = Replaced(*headers)
    assert ask_three_times(made) == [OLD, OLD, OLD]
    assert made.statuses == [200]


async def test_freshness_ends_without_a_date_of_the_server() -> None:
    """An answer without Date was fresh for ever; one of a clock ahead, until that time."""

    async def scenario(*headers: str) -> list[int]:
        made = Replaced("Cache-Control: max-age=1", 'ETag: "old"', *headers)
        async with origin(made.answer) as server, fetcher() as (fetch, _):
            made.server = server
            await fetch.fetch(server.url, "")
            await asyncio.sleep(1.1)
            await fetch.fetch(server.url, "")
        return made.statuses

    for statuses in await asyncio.gather(scenario(), scenario(f"Date: {date(-DAY)}")):
        assert statuses == [200, 304]


def test_what_a_304_says_replaces_what_was_said_before() -> None:
    later = Replaced(
        "Cache-Control: max-age=0", 'ETag: "old"', confirmed=("Cache-Control: max-age=600",)
    )
    assert ask_three_times(later) == [OLD, OLD, OLD]
    assert later.statuses == [200, 304]
    never = Replaced(
        "Cache-Control: no-cache", 'ETag: "old"', confirmed=("Cache-Control: no-store",)
    )
    assert ask_three_times(never) == [OLD, OLD, NEW]
    assert never.statuses == [200, 304, 200]


@pytest.mark.parametrize("status", ["301 Moved Permanently", "308 Permanent Redirect"])
def test_a_permanent_redirect_is_asked_again_unless_it_says_how_long_it_holds(status: str) -> None:
    async def scenario(*headers: str) -> tuple[list[bytes], list[str]]:
        target = ["/old.png"]

        async def answer(path: str, writer: asyncio.StreamWriter) -> None:
            if path == "/now.png":
                changed = f"Last-Modified: {date(365 * DAY)}"
                send(writer, status, b"", f"Location: {target[0]}", changed, *headers)
            else:
                send(writer, "200 OK", OLD if path == "/old.png" else NEW)

        async with origin(answer) as server, fetcher() as (fetch, _):
            found = [await fetch.fetch(server.url + "/now.png", "")]
            target[0] = "/new.png"
            found.append(await fetch.fetch(server.url + "/now.png", ""))
            return found, [line.split()[1] for line in server.requests]

    assert asyncio.run(scenario()) == (
        [OLD, NEW],
        ["/now.png", "/old.png", "/now.png", "/new.png"],
    )
    fresh = asyncio.run(scenario("Cache-Control: max-age=600"))
    assert fresh == ([OLD, OLD], ["/now.png", "/old.png", "/old.png"])


async def test_a_flight_is_shared_only_by_those_who_ask_while_it_is_under_way() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        first = len(server.requests) == 1
        begun.set()
        await go_on.wait()
        send(writer, "200 OK", OLD if first else NEW, f"Last-Modified: {date(DAY)}")

    async with origin(answer) as server, fetcher() as (fetch, _):
        one = asyncio.create_task(fetch.fetch(server.url, ""))
        await begun.wait()
        two = asyncio.create_task(fetch.fetch(server.url, ""))
        await asyncio.sleep(0)
        go_on.set()
        assert [await one, await two] == [OLD, OLD]
        assert await fetch.fetch(server.url, "") == NEW
        assert len(server.requests) == 2


async def test_a_replaced_local_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    async with fetcher(allowed_local_media_path=str(tmp_path)) as (fetch, _):
        for content in (OLD, NEW):
            file.write_bytes(content)
            assert await fetch.fetch(file.as_uri(), "") == content


def test_answers_that_can_spare_nothing_are_not_kept() -> None:
    async def scenario(*headers: str) -> int:
        made = Replaced(*headers)
        async with origin(made.answer) as server, fetcher() as (fetch, _):
            made.server = server
            await fetch.fetch(server.url, "")
            return len(fetch._cache._kept)

    assert asyncio.run(scenario("Content-Type: image/png")) == 0
    assert asyncio.run(scenario('ETag: "old"')) == 1


# ---- content codings


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(data) + made.flush()


def as_it_is(data: bytes) -> bytes:
    return data


async def fetch_encoded(fetch: Fetcher, coding: str, body: bytes) -> bytes:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        send(writer, "200 OK", body, f"Content-Encoding: {coding}")

    async with origin(answer) as server:
        found = await fetch.fetch(server.url + "/a.png", "")
        assert "accept-encoding: identity\r\n" in server.requests[0].lower()
        return found


@pytest.mark.parametrize(
    ("coding", "encode"),
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("x-gzip", gzip.compress),
        ("gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:])),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("identity", as_it_is),
        ("identity, gzip", gzip.compress),
    ],
)
def test_encoded_images_are_decoded(coding: str, encode: Callable[[bytes], bytes]) -> None:
    async def scenario() -> bytes:
        async with fetcher() as (fetch, _):
            return await fetch_encoded(fetch, coding, encode(PICTURE))

    assert asyncio.run(scenario()) == PICTURE


async def test_an_encoded_image_is_kept_decoded() -> None:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        headers = 'ETag: "a"', "Content-Encoding: gzip"
        if "if-none-match" in server.requests[-1].lower():
            send(writer, "304 Not Modified", b"", *headers)
        else:
            send(writer, "200 OK", gzip.compress(PICTURE), *headers)

    async with origin(answer) as server, fetcher() as (fetch, metrics):
        for _ in range(2):
            assert await fetch.fetch(server.url, "") == PICTURE
        assert metrics.value("saccade_images_fetched_total") == 1


@pytest.mark.parametrize(
    ("coding", "body", "words"),
    [
        ("br", PICTURE, r"/a.png is compressed \(br\), which is not supported"),
        ("zstd", PICTURE, r"compressed \(zstd\), which is not supported: .* gzip or deflate"),
        ("gzip, gzip", PICTURE, r"compressed \(gzip, gzip\), which is not supported"),
        ("gzip", PICTURE, "and cannot be decompressed"),
        ("gzip", gzip.compress(PICTURE)[:-9], "and is truncated"),
        ("gzip", b"", "and is truncated"),
        ("gzip", b"\x1f", "and is truncated"),
        ("gzip", gzip.compress(b"") * 20, "and has trailing data"),
        ("deflate", zlib.compress(PICTURE) + b"more", "and has trailing data"),
    ],
)
async def test_what_does_not_decode_is_named(coding: str, body: bytes, words: str) -> None:
    async with fetcher() as (fetch, metrics):
        with pytest.raises(ImageError, match=words):
            await fetch_encoded(fetch, coding, body)
        assert metrics.value("saccade_images_fetched_total") == 0


async def test_few_bytes_that_stand_for_many_end_at_the_limit() -> None:
    """Of 64 MiB in 64 KiB, no more than a piece beyond the limit is made."""
    bomb = gzip.compress(bytes(64 << 20))
    assert max(map(len, ContentDecoder("gzip", "").feed(bomb))) <= PIECE
    async with fetcher(max_image_bytes=1 << 20) as (fetch, _):
        with pytest.raises(TooLarge, match=r"over 1\.05 MB"):
            await fetch_encoded(fetch, "gzip", bomb)
