"""Fetching: every kind of URL, the limits, one flight per URL, and no way to a private address."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
from pathlib import Path

import hishel
import pytest

from saccade.core.errors import ImageError, RequestError, TooLarge
from saccade.plugins.fetch import network
from saccade.plugins.fetch.http_cache import HEAD_BYTES, HTTPCache, HttpResponse
from saccade.plugins.fetch.network import is_public
from tests.helpers.images import data_url
from tests.media.origins import PICTURE, fetcher, ok, origin


async def refusal(url: str, **options: object) -> RequestError:
    async with fetcher(**options) as (fetch, metrics):  # type: ignore[arg-type]
        with pytest.raises(RequestError) as raised:
            await fetch.fetch(url, "")
        assert metrics.value("saccade_images_fetched_total") == 0
        return raised.value


async def test_data_urls_carry_their_bytes() -> None:
    async with fetcher() as (fetch, metrics):
        for data in (b"", b"abc", PICTURE * 200):
            assert await fetch.fetch(data_url(data), "") == data
        assert await fetch.fetch("DATA:;BASE64,QUJD", "") == b"ABC"
        assert (
            await fetch.fetch(
                "data:image/png;base64," + base64.encodebytes(PICTURE * 200).decode(), ""
            )
            == PICTURE * 200
        )
        assert metrics.value("saccade_images_fetched_total") == 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,QUJ*", "not valid base64: character 4 of 4 is '*'; allowed are"),
        (
            "data:image/png;base64,QUJDR",
            "not valid base64: 5 characters, which is not a whole number of bytes",
        ),
        ("data:image/png;base64,QU===JD", "not valid base64: character 3 of 7 is '='"),
        ("data:image/png;base64,QUI======", "not valid base64: 6 characters = at the end"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64", "no comma"),
        ("ftp://example.com/a.png", "must start with"),
        ("a.png", "must start with"),
        ("", "must start with"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
        ("http://", "http"),
        ("http://[::1", "not a valid URL"),
        ("http://127.0.0.1:999999/", "not a valid URL"),
    ],
)
def test_a_url_that_will_not_do_is_refused_precisely(url: str, message: str) -> None:
    error = asyncio.run(refusal(url))
    assert isinstance(error, ImageError)
    assert message in error.message


async def test_connections_are_reused() -> None:
    async with origin(ok) as server, fetcher() as (fetch, metrics):
        for number in range(3):
            assert await fetch.fetch(f"{server.url}/{number}", "") == PICTURE
        assert (server.connections, len(server.requests)) == (1, 3)
        assert metrics.value("saccade_images_fetched_total") == 3
        assert f"Host: {server.url[7:]}\r\n" in server.requests[0]


async def test_sixteen_requests_for_one_url_make_one_get() -> None:
    async with origin(ok) as server, fetcher() as (fetch, metrics):
        bodies = await asyncio.gather(*(fetch.fetch(server.url, "") for _ in range(16)))
        assert bodies == [PICTURE] * 16
        assert len(server.requests) == 1
        await asyncio.gather(fetch.fetch(server.url, "one"), fetch.fetch(server.url, "other"))
        assert len(server.requests) == 3, "tenants share nothing"
        assert metrics.value("saccade_images_fetched_total") == 3


async def test_different_urls_are_fetched_beside_each_other() -> None:
    all_here = asyncio.Barrier(8)

    async def together(path: str, writer: asyncio.StreamWriter) -> None:
        await all_here.wait()  # answers nobody before the last has come
        await ok(path, writer)

    async with origin(together) as server, fetcher() as (fetch, _):
        await asyncio.gather(*(fetch.fetch(f"{server.url}/{number}", "") for number in range(8)))


async def test_the_others_get_it_when_the_first_leaves_and_the_last_ends_it() -> None:
    go, left = asyncio.Event(), asyncio.Event()

    async def on_signal(path: str, writer: asyncio.StreamWriter) -> None:
        try:
            await go.wait()
        finally:
            left.set()
        await ok(path, writer)

    async with origin(on_signal) as server, fetcher() as (fetch, metrics):
        first, second = (asyncio.create_task(fetch.fetch(server.url, "")) for _ in range(2))
        while not server.requests:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)
        go.set()
        assert await second == PICTURE
        assert len(server.requests) == 1
        go.clear()
        alone = asyncio.create_task(fetch.fetch(server.url, ""))
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        assert metrics.value("saccade_images_fetched_total") == 1
        go.set()


async def test_a_failed_fetch_is_not_remembered() -> None:
    async def second_time(path: str, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
        else:
            await ok(path, writer)

    async with origin(second_time) as server, fetcher() as (fetch, _):
        with pytest.raises(ImageError, match="returned HTTP status 503"):
            await fetch.fetch(server.url, "")
        assert await fetch.fetch(server.url, "") == PICTURE


def test_a_body_over_the_limit_is_cut_off_while_it_comes() -> None:
    async def scenario() -> None:
        sent = 0

        async def endless(path: str, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            if path == "/declared":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                return
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while sent < 2**26:
                writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
                await writer.drain()
                sent += 65536

        async with origin(endless) as server, fetcher(max_image_bytes=50_000) as (fetch, _):
            for path in ("/declared", "/streamed"):
                with pytest.raises(TooLarge, match="--tune max_image_bytes"):
                    await fetch.fetch(server.url + path, "")
            assert sent < 2**26

    asyncio.run(scenario())
    assert isinstance(
        asyncio.run(refusal(data_url(bytes(60_000)), max_image_bytes=50_000)), TooLarge
    )


async def test_a_slow_drip_ends_at_the_total_limit() -> None:
    async def drip(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with origin(drip) as server, fetcher(fetch_timeout=0.3) as (fetch, _):
        with pytest.raises(ImageError, match=r"took longer than 0\.3 s"):
            await fetch.fetch(server.url, "")


async def test_pictures_are_kept_as_their_servers_allow() -> None:
    def send(writer: asyncio.StreamWriter, status: str, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def kept(path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/tagged" and 'if-none-match: "a"' in server.requests[-1].lower():
            send(writer, "304 Not Modified", b"", 'ETag: "a"', "Cache-Control: no-cache")
        elif path == "/moved":
            send(writer, "301 Moved", b"", "Location: /fresh", "Cache-Control: max-age=60")
        elif path == "/gone":
            send(writer, "404 Not Found", b"", "Cache-Control: max-age=60")
        else:
            rule = {
                "/fresh": "max-age=60",
                "/secret": "no-store",
                "/private": "private, max-age=60",
            }.get(path, "no-cache")
            send(writer, "200 OK", PICTURE, f"Cache-Control: {rule}", 'ETag: "a"')

    async with origin(kept) as server, fetcher() as (fetch, metrics):
        for path, gets, bodies in (
            ("/fresh", 1, 1),
            ("/tagged", 3, 1),
            ("/secret", 3, 3),
            ("/private", 3, 3),
        ):
            server.requests.clear()
            before = metrics.value("saccade_images_fetched_total")
            for _ in range(3):
                assert await fetch.fetch(server.url + path, "") == PICTURE
            assert (path, len(server.requests)) == (path, gets)
            assert (path, metrics.value("saccade_images_fetched_total") - before) == (
                path,
                bodies,
            )
        server.requests.clear()
        for _ in range(3):
            assert await fetch.fetch(f"{server.url}/moved", "") == PICTURE
        assert [line.split()[1] for line in server.requests] == ["/moved"]
        for _ in range(2):
            with pytest.raises(ImageError, match="returned HTTP status 404"):
                await fetch.fetch(f"{server.url}/gone", "")
        assert len(server.requests) == 3, "failures are not remembered"
        await fetch.fetch(f"{server.url}/fresh", "tenant")
        assert len(server.requests) == 4, "tenants share nothing"


async def test_kept_pictures_are_bounded_by_bytes() -> None:
    sent: list[str] = []
    cache = HTTPCache(250 + 2 * HEAD_BYTES)

    async def get(url: str) -> None:
        async def send(headers: hishel.Headers) -> HttpResponse:
            sent.append(url)
            return HttpResponse(200, hishel.Headers({"cache-control": "max-age=60"}), bytes(100))

        assert (await cache.get(url, "", hishel.Headers({}), send)).body == bytes(100)

    for url in (
        "http://a/1",
        "http://a/2",
        "http://a/1",
        "http://a/3",
        "http://a/1",
        "http://a/2",
    ):
        await get(url)
    assert [url[-1] for url in sent] == ["1", "2", "3", "2"], "the least recently used made room"


async def redirecting(path: str, writer: asyncio.StreamWriter) -> None:
    """/loop/N redirects to /loop/N+1; /to?URL to URL; all else is the picture."""
    if path.startswith("/loop/"):
        target = f"/loop/{int(path[6:]) + 1}"
    elif path.startswith("/to?"):
        target = path[4:]
    else:
        await ok(path, writer)
        return
    writer.write(f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())


async def test_redirects_are_followed_a_few_times() -> None:
    async with origin(redirecting) as server, fetcher() as (fetch, _):
        assert await fetch.fetch(f"{server.url}/to?/there", "") == PICTURE
        with pytest.raises(ImageError, match="more than 5 times"):
            await fetch.fetch(f"{server.url}/loop/0", "")
        with pytest.raises(ImageError, match="not http or https"):
            await fetch.fetch(f"{server.url}/to?file:///etc/passwd", "")


async def test_a_redirect_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 stands for a public host here; 127.0.0.1 is as private as ever."""
    monkeypatch.setattr(network, "is_public", lambda found: str(found) == "127.0.0.2")
    async with origin(redirecting, "127.0.0.2") as public, origin(ok) as private:
        async with fetcher(allow_private_media=False) as (fetch, _):
            assert await fetch.fetch(f"{public.url}/", "") == PICTURE
            with pytest.raises(ImageError, match="private, local or reserved"):
                await fetch.fetch(f"{public.url}/to?{private.url}", "")
            assert private.connections == 0


SPELLINGS = [
    *(
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
    ),
    *(
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "224.0.0.1",
        "255.255.255.255",
    ),
    *(
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:a00:1]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "[ff0e::1]",
        "[fec0::1]",
    ),
    *("[64:ff9b::7f00:1]", "[64:ff9b:1::1]", "[2002:7f00:1::]", "[2001:0:0:0:0:0:80ff:fffe]"),
]


@pytest.mark.parametrize("host", SPELLINGS)
def test_no_spelling_of_a_private_address_gets_through(host: str) -> None:
    error = asyncio.run(refusal(f"http://{host}:1/a.png", allow_private_media=False))
    assert error.code in ("image_address_refused", "invalid_image_url"), (
        "the latter for spellings that are no URL"
    )


@pytest.mark.parametrize(
    "found",
    [["10.0.0.7"], ["93.184.215.14", "127.0.0.1"], ["::ffff:192.168.0.1"], ["fe80::1%eth0"]],
)
def test_a_name_that_resolves_to_a_private_address_is_refused(found: list[str]) -> None:
    async def lie(host: str, port: int) -> list[str]:
        assert (host, port) == ("pictures.example", 80)
        return found

    error = asyncio.run(
        refusal("http://pictures.example/a.png", resolve=lie, allow_private_media=False)
    )
    assert error.code == "image_address_refused"
    assert "'pictures.example'" in error.message


@pytest.mark.parametrize(
    "public", ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "2002:808:808::", "64:ff9b::808:808"]
)
def test_public_addresses_are_public(public: str) -> None:
    assert is_public(ipaddress.ip_address(public))


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """The name is resolved once; its Host header stays."""
    asked: list[str] = []

    async def once(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    async with origin(ok) as server, fetcher(once) as (fetch, _):
        assert await fetch.fetch(server.url.replace("127.0.0.1", "pictures.example"), "") == PICTURE
        assert asked == ["pictures.example"]
        assert "Host: pictures.example:" in server.requests[0]


def test_an_unknown_host_is_named() -> None:
    async def nowhere(host: str, port: int) -> list[str]:
        raise OSError("unknown")

    assert (
        "'no.example' cannot be found"
        in asyncio.run(refusal("http://no.example/", resolve=nowhere)).message
    )


async def test_only_allowed_domains_are_asked() -> None:
    async def here(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with (
        origin(redirecting) as server,
        fetcher(here, allowed_media_domains=("good.example",)) as (fetch, _),
    ):
        port = server.url.rpartition(":")[2]
        assert await fetch.fetch(f"http://good.example:{port}/", "") == PICTURE
        assert await fetch.fetch(f"http://cdn.GOOD.example:{port}/", "") == PICTURE
        for url in (
            f"http://evilgood.example:{port}/",
            f"http://good.example:{port}/to?http://bad.example:{port}/",
        ):
            with pytest.raises(ImageError, match="--allowed-media-domains"):
                await fetch.fetch(url, "")


async def test_files_are_read_only_below_the_allowed_folder(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    root.mkdir()
    (root / "a b.png").write_bytes(PICTURE)
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "inner").symlink_to(root / "a b.png")
    os.mkfifo(root / "fifo")
    async with fetcher(allowed_local_media_path=str(root)) as (fetch, _):
        assert await fetch.fetch(f"file://{root}/a%20b.png", "") == PICTURE
        assert await fetch.fetch(f"file://localhost{root}/inner", "") == PICTURE
        for path in (
            f"{root}/../secret",
            f"{root}/%2e%2e/secret",
            f"{root}/link",
            f"{root}/fifo",
            f"{root}/none",
            str(root),
            f"elsewhere{root}/inner",
        ):
            with pytest.raises(ImageError, match="below the allowed folder"):
                await fetch.fetch(f"file://{path}", "")
    async with fetcher(allowed_local_media_path=str(root), max_image_bytes=100) as (fetch, _):
        with pytest.raises(TooLarge):
            await fetch.fetch(f"file://{root}/inner", "")
