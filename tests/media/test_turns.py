"""Turns at fetching: no request and no client holds every place, and what waits costs nobody."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from saccade.core.errors import ImageError, Overloaded, RequestError
from saccade.media.sources.fairness import Boundless, FairPermits, Requester, Ticket
from saccade.media.sources.source import FileId, ImageSource
from saccade.plugins.fetch import fetcher as fetch_module
from saccade.plugins.fetch.fetcher import (
    CLIENT_FETCHES,
    LOCAL_READS,
    MAX_FETCHES,
    REQUEST_FETCHES,
    REQUEST_READS,
    Fetcher,
)
from saccade.plugins.files.uploads import uploads_of
from tests.media.conftest import MakePath
from tests.media.origins import PICTURE, fetcher, ok, origin
from tests.media.pictures import encode, noise


class Counted(Boundless):
    """Room for `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = self.most = 0

    def reserve(self, nbytes: int) -> None:
        if self.held + nbytes > self.limit:
            raise Overloaded("no room")
        self.held += nbytes
        self.most = max(self.most, self.held)


async def silence(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


def connections(fetch: Fetcher) -> int:
    return len(fetch._pool.connections)


# ---- the queue


def given(tickets: list[Ticket]) -> list[int]:
    return [number for number, ticket in enumerate(tickets) if ticket.turn.done()]


async def test_places_go_round_between_clients_and_between_their_requests() -> None:
    turns = FairPermits(places=4, per_client=3, per_request=2)
    one, other, stranger = Requester("a"), Requester("a"), Requester("b")
    tickets = [Ticket() for _ in range(9)]
    for ticket in tickets[:5]:
        turns.enter(ticket, one)
    assert given(tickets) == [0, 1], "a request has at most two"
    for ticket in tickets[5:7]:
        turns.enter(ticket, other)
    assert given(tickets) == [0, 1, 5], "a client has at most three"
    for ticket in tickets[7:]:
        turns.enter(ticket, stranger)
    assert given(tickets) == [0, 1, 5, 7]
    turns.leave(tickets[0])
    assert given(tickets)[-1] == 8, "who has fewest is next"
    turns.leave(tickets[5])
    assert not tickets[2].turn.done() or not tickets[6].turn.done()
    for ticket in tickets:
        turns.leave(ticket)
    last = [Ticket() for _ in range(2)]
    for ticket in last:
        turns.enter(ticket, one)
    assert given(last) == [0, 1] and turns.waiting == 0, "every place came back"


async def test_what_several_ask_for_has_the_first_turn_of_any() -> None:
    turns = FairPermits(places=2, per_client=1, per_request=1)
    hog, guest = Requester("a"), Requester("b")
    held, shared = Ticket(), Ticket()
    turns.enter(held, hog)
    turns.enter(shared, hog)
    assert not shared.turn.done()
    turns.enter(shared, guest)
    assert shared.turn.result() is guest


async def test_who_waits_too_long_is_told_and_leaves_nothing() -> None:
    turns = FairPermits(places=1, per_client=1, per_request=1)
    first, second, third = Ticket(), Ticket(), Ticket()
    turns.enter(first, Requester())
    turns.enter(second, Requester())
    with pytest.raises(Overloaded, match="are queued"):
        await turns.wait(second, 0.01)
    turns.leave(second)
    turns.leave(first)
    turns.enter(third, Requester())
    assert third.turn.done()


# ---- fetching


@pytest.mark.more
async def test_after_hundreds_of_fetches_that_timed_out_the_next_is_like_the_first() -> None:
    async with (
        origin(silence) as silent,
        origin(ok) as server,
        fetcher(fetch_timeout=1.0) as (fetch, _),
    ):
        assert await fetch.fetch(f"{server.url}/kept-alive", "") == PICTURE
        for turn in range(2):
            requester = Requester()
            fetches = [
                asyncio.create_task(fetch.fetch(f"{silent.url}/{turn}/{n}", "", requester))
                for n in range(256)
            ]
            with pytest.raises(ImageError, match="took longer than 1 s"):
                await asyncio.gather(*fetches)
            for each in fetches:  # as a request does when one of its pictures fails
                each.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)
            async with asyncio.timeout(20):
                while connections(fetch) > 1:  # all but the one that is kept alive
                    await asyncio.sleep(0.01)
        assert await fetch.fetch(f"{server.url}/after", "") == PICTURE
        assert server.connections == 1
        assert 0 < silent.connections <= 4 * REQUEST_FETCHES


@pytest.mark.more
async def test_whenever_a_fetch_is_given_up_no_connection_is_lost() -> None:
    chance = random.Random(2)

    async def sometime(path: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(chance.random() * 0.02)
        await ok(path, writer)

    async with (
        origin(silence) as silent,
        origin(sometime) as one,
        origin(sometime) as other,
        fetcher(fetch_timeout=0.2) as (fetch, _),
    ):
        fetch._pool._keepalive_expiry = 0.01

        async def leave_sometime(n: int) -> None:
            url = chance.choice([silent.url, one.url, other.url, one.url, other.url])
            task = asyncio.create_task(fetch.fetch(f"{url}/{n}", "", Requester(str(n % 7))))
            if chance.random() < 0.6:
                for _ in range(chance.randrange(10)):
                    await asyncio.sleep(0)
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random() * 0.03)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for _ in range(6):
            await asyncio.gather(*(leave_sometime(n) for n in range(100)))
        async with asyncio.timeout(20):
            while connections(fetch) > 1:
                await asyncio.sleep(0.05)
                with suppress(ImageError):  # a busy machine may take longer than 0.2 s
                    assert await fetch.fetch(one.url, "") == PICTURE


async def test_no_request_and_no_client_holds_every_place() -> None:
    async with (
        origin(silence) as silent,
        origin(ok) as server,
        fetcher() as (fetch, _),
    ):

        def ask(requester: Requester, request: int) -> list[asyncio.Task[bytes]]:
            return [
                asyncio.create_task(fetch.fetch(f"{silent.url}/{request}/{n}", "", requester))
                for n in range(MAX_FETCHES)
            ]

        tasks = ask(Requester("hog"), 0)
        while len(silent.requests) < REQUEST_FETCHES:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            assert await fetch.fetch(f"{server.url}/1", "", Requester("hog")) == PICTURE
        tasks += [task for request in range(1, 4) for task in ask(Requester("hog"), request)]
        while len(silent.requests) < CLIENT_FETCHES:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            assert await fetch.fetch(f"{server.url}/2", "", Requester("guest")) == PICTURE
        assert len(silent.requests) == CLIENT_FETCHES
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.more
async def test_the_clock_of_a_fetch_starts_with_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "REQUEST_FETCHES", 1)

    async def slow(path: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        await ok(path, writer)

    async with origin(slow) as server, fetcher(fetch_timeout=1.5) as (fetch, _):
        requester = Requester()
        fetched = await asyncio.gather(
            *(fetch.fetch(f"{server.url}/{n}", "", requester) for n in range(6))
        )  # one after another: 1.8 s
        assert fetched == [PICTURE] * 6


async def test_what_is_kept_needs_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "MAX_FETCHES", 1)

    async def kept(path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/silent":
            await silence(path, writer)
        writer.write(
            b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: %d\r\n\r\n"
            % len(PICTURE)
            + PICTURE
        )

    async with origin(kept) as server, fetcher() as (fetch, _):
        assert await fetch.fetch(f"{server.url}/a", "") == PICTURE
        waiting = asyncio.create_task(fetch.fetch(f"{server.url}/silent", ""))
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        room = Counted(len(PICTURE))
        async with asyncio.timeout(5):
            assert await fetch.fetch(f"{server.url}/a", "", Requester(budget=room)) == PICTURE
        assert room.held == len(PICTURE), "kept bytes count like all others"
        waiting.cancel()


async def test_a_name_server_that_does_not_answer_holds_up_no_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(*_: object, **__: object) -> list[object]:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    async with fetcher(allow_private_media=False) as (fetch, _):
        lookups = [
            asyncio.create_task(fetch.fetch(f"http://host{n}.test/", "", Requester(str(n))))
            for n in range(MAX_FETCHES)
        ]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            assert await asyncio.to_thread(lambda: 7) == 7
        release.set()
        assert all(await asyncio.gather(*lookups, return_exceptions=True))


@pytest.mark.parametrize(
    "url",
    [
        "http://xn--/",
        "http://xn--zzzzzzzz99999999999/",
        "http://a.xn--/a.png",
        "http://\u2100.xn--zzzzzzzz99999999999/",
    ],
)
async def test_a_host_that_is_no_name_is_refused_by_name(url: str) -> None:
    async with fetcher() as (fetch, _):
        with pytest.raises(ImageError) as raised:
            await fetch.fetch(url, "")
        assert raised.value.code in ("invalid_image_url", "image_unreachable")
        assert url.split("/")[2].rpartition(".")[2] in raised.value.message


async def test_links_in_a_circle_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    async with fetcher(allowed_local_media_path=str(tmp_path)) as (fetch, _):
        with pytest.raises(ImageError, match="not a readable file"):
            await fetch.fetch(f"file://{tmp_path}/a", "")


async def test_local_files_take_no_place_of_other_fetches_and_give_their_own_back(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    async with (
        fetcher(allowed_local_media_path=str(tmp_path), fetch_timeout=0.5) as (fetch, _),
        origin(ok) as server,
    ):
        requester = Requester("one")
        for _ in range(2 * MAX_FETCHES):
            assert await fetch.fetch(f"file://{tmp_path}/a.png", "", requester) == b"a"
        assert await fetch.fetch(f"{server.url}/a", "", requester) == PICTURE


def test_a_folder_that_does_not_answer_holds_up_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", *map(str, range(40))):
        (tmp_path / name).write_bytes(b"a")
    back, open_file = threading.Event(), Fetcher._open_file
    begun: list[str] = []

    def away(self: Fetcher, url: str) -> BinaryIO:
        if not url.endswith("here"):
            begun.append(url)
            assert back.wait(60)
        return open_file(self, url)

    monkeypatch.setattr(Fetcher, "_open_file", away)
    monkeypatch.setattr("saccade.plugins.fetch.fetcher.PATIENCE", 1)

    async def scenario() -> None:
        folder = str(tmp_path)
        async with fetcher(allowed_local_media_path=folder, fetch_timeout=0.2) as (fetch, _):
            urls, hung = [f"file://{tmp_path}/{n}" for n in range(40)], Requester("hung")
            ends = await asyncio.gather(
                *(fetch.fetch(url, "", hung) for url in urls), return_exceptions=True
            )
            codes = Counter(type(end).__name__ for end in ends)
            assert codes == {"ImageError": REQUEST_READS, "Overloaded": 40 - REQUEST_READS}
            assert len(begun) == REQUEST_READS, "each thread that hangs holds a place"
            await asyncio.to_thread(int)
            assert await fetch.fetch(f"file://{tmp_path}/here", "", Requester("other")) == b"a"
            back.set()
            assert await fetch.fetch(urls[0], "", hung) == b"a", "places come back with the folder"
            async with asyncio.timeout(30):
                while fetch._disk_turns._free < LOCAL_READS:
                    await asyncio.sleep(0.01)

    try:
        asyncio.run(scenario())
    finally:
        back.set()


# ---- bytes are counted before they are there


async def test_what_comes_by_url_is_counted_as_it_comes_and_ends_where_there_is_no_room() -> None:
    sent = 0

    async def unannounced(path: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for _ in range(1000):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1
        writer.close()

    async def announced(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n")

    room = Counted(1 << 20)
    async with (
        origin(unannounced) as endless,
        origin(announced) as honest,
        fetcher() as (fetch, _),
    ):
        for url in (endless.url, honest.url):  # the second never sends a byte of its body
            with pytest.raises(Overloaded):
                await fetch.fetch(url, "", Requester(budget=room))
            assert room.held == 0
        assert room.most <= 1 << 20 and sent < 500


async def test_of_two_who_share_a_fetch_only_the_one_without_room_is_refused() -> None:
    async with origin(ok) as server, fetcher() as (fetch, _):
        narrow, wide = Counted(10), Counted(1 << 20)
        refused, fetched = await asyncio.gather(
            fetch.fetch(server.url, "", Requester(budget=narrow)),
            fetch.fetch(server.url, "", Requester(budget=wide)),
            return_exceptions=True,
        )
        assert isinstance(refused, RequestError) and fetched == PICTURE
        assert (narrow.held, wide.held, len(server.requests)) == (0, len(PICTURE), 1)


async def test_a_file_named_many_times_is_read_once_and_held_once(
    media_path: MakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(noise(100, 100))
    async with media_path(files_dir=str(tmp_path)) as path:
        reads = 0
        read = uploads_of(path.media)._store.read

        def counted(id: str, owner: str) -> bytes:
            nonlocal reads
            reads += 1
            return read(id, owner)

        monkeypatch.setattr(uploads_of(path.media)._store, "read", counted)
        ids = [(await uploads_of(path.media).save(data, "a", "vision", None)).id for _ in range(2)]
        sources = [ImageSource(FileId(ids[n % 2]), f"messages[0].content[{n}]") for n in range(64)]
        rooms = [Counted(1 << 20) for _ in range(3)]
        requests = await asyncio.gather(
            *(path.media.open_all(sources, "", Requester(budget=room)) for room in rooms)
        )
        pictures = [picture for request in requests for each in request for picture in each.images]
        assert reads == 1 and len({picture.encoded for picture in pictures}) == 1
        assert all(room.most <= 2 * len(data) for room in rooms), "once for each id"
        late = (await path.media.open_all(sources[:1], "", Requester()))[0]
        assert reads == 1 and late.images[0].encoded is pictures[0].encoded


async def test_a_file_that_does_not_fit_is_not_read(media_path: MakePath, tmp_path: Path) -> None:
    data = encode(noise(100, 100))
    async with media_path(files_dir=str(tmp_path)) as path:
        stored = await uploads_of(path.media).save(data, "a", "vision", None)
        next(tmp_path.glob("*/content")).write_bytes(bytes(len(data)))  # reading would tell
        room = Counted(len(data) - 1)
        with pytest.raises(Overloaded):
            await path.media.open_all(
                [ImageSource(FileId(stored.id), "here")], "", Requester(budget=room)
            )
        assert room.most == 0 and next(tmp_path.glob("*/content"), None)


async def test_one_picture_by_many_urls_of_one_request_is_fetched_once(
    media_path: MakePath,
) -> None:
    data = encode(noise(60, 60))

    async def picture(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)

    async with origin(picture) as server, media_path(allow_private_media=True) as path:
        urls = [f"{server.url}/a"] * 20 + [f"{server.url}/b"]
        opened = await path.media.open_all([ImageSource(url, "here") for url in urls], "")
        assert len(server.requests) == 2 and len({each.images[0].encoded for each in opened}) == 1
