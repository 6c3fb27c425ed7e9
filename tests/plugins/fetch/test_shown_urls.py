"""No error repeats the user and the password of an image's URL."""

from __future__ import annotations

import asyncio

import pytest

from saccade.core.errors import ConfigError, ImageError, RequestError
from saccade.core.metrics import Metrics
from saccade.core.shown_url import MOST, shown_url
from saccade.edge.upstream import parse_worker
from saccade.families.kit.native_images import ImageRules, smart_resize
from saccade.plugins.fetch.fetcher import Fetcher
from saccade.tools.server import root, unreachable
from tests.helpers.options import serve_options

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://a.b/c.png", "https://a.b/c.png"),
        ("https://a.b:81/@c/d?e=f@g", "https://a.b:81/@c/d?e=f@g"),
        ("https://u:hunter2@a.b/c.png", "https://...@a.b/c.png"),
        ("https://u:hunter2@x@a.b/c.png", "https://...@a.b/c.png"),
        ("https://u:hun/hunter2@a.b/c.png", "https://...@a.b/c.png"),
        ("https://u:hunter2?@a.b", "https://...@a.b"),
        ("HTTP:/\\hunter2@a.b", "HTTP:/\\...@a.b"),
        ("http:u:hunter2@a.b", "http:...@a.b"),
        ("u:hunter2@a.b", "u:...@a.b"),
        (" https://hunter2@[::1]:80/", " https://...@[::1]:80/"),
        ("https://[::1]:80/@a", "https://[::1]:80/@a"),
        ("file://u:hunter2@a/b", "file://...@a/b"),
        ("https://u:" + "x" * 300 + SECRET + "@a.b/c", "https://...@a.b/c"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown
    assert len(shown_url(url + "x" * 500)) == MOST


async def refused(url: str, **options: object) -> RequestError:
    given: dict[str, object] = {"allow_private_media": True, "fetch_timeout": 5, **options}
    fetcher = Fetcher(serve_options(**given), Metrics())
    try:
        with pytest.raises(RequestError) as raised:
            await fetcher.fetch(url, "")
        return raised.value
    finally:
        await fetcher.close()


@pytest.mark.parametrize(
    "rest",
    [
        "@127.0.0.1:1/a",  # nobody listens
        "@127.0.0.1:999999/a",
        "@[::1/a",
        "@/a",
        ":x@127.0.0.1:1/a",
        "@a b/c",
    ],
)
@pytest.mark.parametrize("before", ["http://u:", "http://", "file://u:", "http://u:x/"])
def test_no_refusal_of_a_url_repeats_it(before: str, rest: str, tmp_path: object) -> None:
    options = {"allowed_local_media_path": str(tmp_path)}
    error = asyncio.run(refused(f"{before}{SECRET}{rest}", **options))
    assert SECRET not in error.message


ANSWERS = {
    "404": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "no server": b"",
    "half": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nxy",
    "no HTTP": b"hello\r\n\r\n",
    **{
        f"to {to}": f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()
        for to in (
            "http://u:hunter2@127.0.0.1:1/b",
            "http://u:hunter2@127.0.0.1:99999/b",
            "http://u:hunter2/x@127.0.0.1:1/b",
            "http://u:hunter2@[::1/b",
            "//u:hunter2@127.0.0.1:1",
            "ftp://u:hunter2@a.b",
        )
    },
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_no_answer_of_its_server_makes_a_refusal_repeat_it(answer: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWERS[answer])
        await writer.drain()
        writer.close()

    async def ask() -> RequestError:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await refused(f"http://u:{SECRET}@127.0.0.1:{port}/a")
        finally:
            server.close()

    error = asyncio.run(ask())
    assert SECRET not in error.message
    assert isinstance(error, ImageError)


def test_so_it_is_with_the_servers_own_addresses() -> None:
    for url in ("http://u:hunter2@a:1", "http://u:hunter2:x@a:1", "https://u:hunter2@a"):
        with pytest.raises(ConfigError) as raised:
            parse_worker(url)
        assert SECRET not in str(raised.value)
    error = unreachable(root("http://u:hunter2@a:1/v1"), OSError("no"))
    assert SECRET not in str(error)


def test_an_aspect_ratio_is_told_as_far_as_it_differs_from_the_limit() -> None:
    half = (0.5, 0.5, 0.5)
    rules = ImageRules(14, 2, 1, 1 << 30, half, half)
    with pytest.raises(ImageError, match=r"an aspect ratio of 200\.1; the limit is 200"):
        smart_resize(2001, 10, rules)
    smart_resize(2000, 10, rules)
