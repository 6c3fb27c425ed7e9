"""Workers that send nonsense, too much, or nothing: a bounded amount of it is taken, who asked gets
a typed error, and others are answered.
"""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest

from saccade.core.options import ConnectionOptions
from saccade.edge.upstream import MAX_WAITING, PIECE_BYTES, Upstream, WorkerDisconnected
from saccade.plugins.proxy.options import ProxyOptions
from saccade.plugins.proxy.run import ProxyServer
from saccade.plugins.route import affinity as keys
from saccade.plugins.route import fleet
from saccade.plugins.route.affinity import MAX_PARTS, MAX_VALUES, AffinityKey, bearing_of_body
from saccade.plugins.route.events import MAX_WAITING as MAX_EVENT
from saccade.plugins.route.events import Events
from saccade.plugins.route.options import RouteOptions
from saccade.plugins.route.run import RouteServer
from tests.abuse.values import BODIES

CHAT = "/v1/chat/completions"
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
STREAM = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FLOOD = 64 << 20
"""Bytes that a worker would send."""
IN_SOCKETS = 16 << 20
"""Bytes that two sockets may hold beside what was taken."""
READ = 1 << 18
"""Bytes that come at once."""


def answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Worker:
    """Answers what `tell` says, as bytes that make no claim to be HTTP. None: nothing, for ever."""

    def __init__(self) -> None:
        self.url = ""
        self.sent = 0
        self.seen: list[str] = []
        self.heads: list[bytes] = []
        self.tell: Callable[[str, bytes], bytes | None] = lambda path, body: answer(b"{}")
        self.forever = b""  # after that, until the other side ends it
        self.closes = False
        self.server: asyncio.Server | None = None
        self.connections = 0
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-le")]
                length = int(lengths[0].split(b":")[1]) if lengths else 0
                body = await reader.readexactly(length)
                if path != "/health":
                    self.seen.append(path)
                    self.heads.append(head)
                said = self.tell(path, body)
                if said is None:
                    continue
                writer.write(said)
                await writer.drain()
                while self.forever and path != "/health" and self.sent < FLOOD:
                    writer.write(self.forever)
                    self.sent += len(self.forever)
                    await writer.drain()
                if self.closes and path != "/health":
                    break
        writer.close()

    def die(self) -> None:
        if self.server is not None:
            self.server.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End every connection; new ones are taken."""
        for writer in self._open:
            writer.transport.abort()


@asynccontextmanager
async def worker() -> AsyncIterator[Worker]:
    made = Worker()
    made.server = server = await asyncio.start_server(made.serve, "127.0.0.1", 0, limit=1 << 30)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        made.die()


def upstream(made: Worker) -> Upstream:
    return Upstream("127.0.0.1", int(made.url.rpartition(":")[2]))


@asynccontextmanager
async def routing(*workers: Worker, **options: int) -> AsyncIterator[httpx.AsyncClient]:
    told = RouteOptions(workers=tuple(each.url for each in workers), port=0, **options)  # type: ignore[arg-type]
    async with running(RouteServer(told, ConnectionOptions())) as client:
        yield client


@asynccontextmanager
async def proxying(upstream: Worker) -> AsyncIterator[httpx.AsyncClient]:
    options = ProxyOptions(upstream=upstream.url, port=0)
    async with running(ProxyServer(options, ConnectionOptions())) as client:
        yield client


@asynccontextmanager
async def running(relay: RouteServer | ProxyServer) -> AsyncIterator[httpx.AsyncClient]:
    ready, found = asyncio.Event(), list[str]()
    serving = asyncio.create_task(
        relay.serve_until_shutdown(lambda address: (found.append(address), ready.set())[0])
    )
    try:
        await ready.wait()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=found[0], timeout=20, limits=limits) as client:
            yield client
    finally:
        relay.should_exit = True
        await serving


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await true():
            await asyncio.sleep(0.02)


# ---- one connection

NONSENSE = {
    "nothing of HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "a status below all": b"HTTP/1.1 000 x\r\ncontent-length: 0\r\n\r\n",
    "a status above all": b"HTTP/1.1 999 x\r\ncontent-length: 0\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    "another protocol, unnamed": b"HTTP/1.1 101 Switching\r\n\r\n" + answer(b"{}"),
    "two lengths": OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\nxx",
    "a length and chunks": OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    "a length below zero": OK + b"content-length: -1\r\n\r\n",
    "a length beyond all": OK + b"content-length: 99999999999999999999\r\n\r\n",
    "no byte of a header": OK + b"x: \x00\r\n\r\n",
    "a line of its own": OK + b"x: a\rb: c\r\n\r\n",
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_what_is_no_answer_is_a_worker_that_has_gone(name: str) -> None:
    async with worker() as made:
        made.tell = lambda path, body: NONSENSE[name]
        with pytest.raises(WorkerDisconnected):
            async with asyncio.timeout(5), upstream(made).exchange(b"GET", GET):
                pass


ENDLESS = {
    "status line": (b"HTTP/1.1 200 ", b"x"),
    "header's name": (OK, b"x"),
    "header's value": (OK + b"x: ", b"x"),
    "headers": (OK, b"a: b\r\n"),
    "news that it goes on": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunk's size": (CHUNKED, b"0"),
    "chunk's extension": (CHUNKED + b"1;", b"x"),
    "trailers": (CHUNKED + chunk(b"x") + b"0\r\n", b"a: b\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_head_or_frame_without_end_is_cut_off(name: str) -> None:
    async with worker() as made:
        begin, more = ENDLESS[name]
        made.tell, made.forever = lambda path, body: begin, more * (65536 // len(more))
        with pytest.raises(WorkerDisconnected):
            async with asyncio.timeout(10), upstream(made).exchange(b"GET", GET) as (_, body):
                async for _ in body:
                    pass
        assert made.sent < IN_SOCKETS


async def test_an_answer_that_nobody_reads_is_not_taken() -> None:
    async with worker() as made:
        made.tell, made.forever = lambda path, body: CHUNKED, chunk(b"x" * 65536)
        async with upstream(made).exchange(b"GET", GET) as (head, body):
            assert head.status == 200
            seen = -1
            while made.sent != seen:
                seen = made.sent
                await asyncio.sleep(0.2)
            assert made.sent < IN_SOCKETS
            assert len(await anext(body)) < MAX_WAITING + 2 * READ
        sent = made.sent
        await asyncio.sleep(0.1)
        assert made.sent - sent < IN_SOCKETS, "who has left is not sent to"


async def test_the_smallest_pieces_come_together() -> None:
    """Each would be an object of its own, and a turn of its own."""
    count = 200_000
    async with worker() as made:
        made.tell = lambda path, body: CHUNKED + chunk(b"x") * count + b"0\r\n\r\n"
        async with upstream(made).exchange(b"GET", GET) as (_, body):
            sizes = [len(piece) async for piece in body]
        assert sum(sizes) == count
        assert max(sizes) < (MAX_WAITING + READ) // PIECE_BYTES * 12
        assert len(sizes) < count // 100


@pytest.mark.parametrize(
    ("line", "connections"), [(b"", 1), (b"connection: close\r\n", 3), (b"x: close\r\n", 1)]
)
async def test_a_connection_is_used_again_where_the_worker_lets_it(
    line: bytes, connections: int
) -> None:
    async with worker() as made:
        made.tell = lambda path, body: OK + line + b"content-length: 2\r\n\r\n{}"
        asked = upstream(made)
        for _ in range(3):
            async with asked.exchange(b"GET", GET) as (_, body):
                assert [each async for each in body] == [b"{}"]
        assert made.connections == connections
        asked.drop()


async def test_one_answer_too_many_is_nobodys() -> None:
    async with worker() as made:
        made.tell = lambda path, body: answer(b"first") + answer(b"second")
        connections = upstream(made)
        for _ in range(2):
            async with connections.exchange(b"GET", GET) as (head, body):
                assert (head.status, [each async for each in body]) == (200, [b"first"])


def test_an_event_without_end_is_not_kept() -> None:
    events, piece = Events(), b"x" * 65536
    went = b"".join(events.feed(piece) for _ in range(100))
    assert len(went) > 100 * len(piece) - MAX_EVENT - len(piece)
    assert events.broken(b"last").startswith(b"\n\n"), "the broken one is no part of the last"
    events.feed(b"\n")
    assert events.feed(b"\ndata: 1\n\ndata: ").endswith(b"data: 1\n\n")
    assert (events.broken(b"last"), events.flush()) == (b"last", b"data: ")


def test_events_are_whole_however_they_come() -> None:
    stream = b"data: 1\n\n: x\n\nevent: a\ndata: 2\n\n"
    for size in range(1, len(stream)):
        events = Events()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        went = [events.feed(piece) for piece in pieces]
        assert b"".join(went) == stream and not events.flush()
        assert all(not each or each.endswith(b"\n\n") for each in went)


# ---- a router in front of them


async def test_what_is_of_one_connection_stays_there_and_names_are_the_routers() -> None:
    """Whatever a client says of lengths, hosts and ids, a worker reads one request, and who it is
    for.
    """
    lines = (
        *("POST /v1/files?a=%0d%0ax:y HTTP/1.1", "Host: localhost:9", "Transfer-Encoding: chunked"),
        *("Connection: keep-alive, x-mine,content-length, Host", "X-Mine: 1", "TE: trailers"),
        *("Keep-Alive: 9", "Proxy-Authorization: a", "Upgrade: h2c", "Trailer: authorization"),
        *("X-Saccade-File-Suffix: 00000000", "X-Request-Id: one two", "X-Forwarded-For: 10.0.0.1"),
        *("Expect: 100-continue", "X-Kept: 2"),
    )
    smuggled = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
    sent = "\r\n".join([*lines, "", ""]).encode() + chunk(smuggled)
    sent += b"0\r\nauthorization: Bearer stolen\r\n\r\n"
    async with worker() as made, routing(made) as client:
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(sent)
        while (status := await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"):
            pass
        assert status.startswith(b"HTTP/1.1 200")
        writer.close()
        (head,) = made.heads
        first, *rest = head.decode().split("\r\n")[:-2]
        assert first == "POST /v1/files?a=%0d%0ax:y HTTP/1.1"
        values = {line.split(": ")[0]: line.split(": ")[1] for line in rest}
        names = sorted(line.split(": ")[0] for line in rest)
        ours = ["content-length", "host", "x-request-id", "x-saccade-file-suffix"]
        assert names == sorted([*ours, "x-forwarded-for", "x-forwarded-host", "x-kept"])
        assert values["x-forwarded-host"] == "localhost:9"
        assert values["host"] == made.url.removeprefix("http://")
        assert values["content-length"] == str(len(smuggled))
        assert values["x-saccade-file-suffix"] != "00000000"
        assert values["x-request-id"].startswith("req-")


UNFIT = {
    "events, with a length": OK
    + b"content-type: text/event-stream\r\ncontent-length: 20\r\n\r\ndata: 1\n\ndata: 2 and ",
    "no content, with a length": b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n",
    "not modified, with a length": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
    "more than its length": OK + b"content-length: 2\r\n\r\nabcdef",
    "less than its length": OK + b"content-length: 20\r\n\r\nabcdef",
}


@pytest.mark.first
@pytest.mark.parametrize("name", UNFIT)
def test_a_length_that_does_not_fit_is_nobodys_fault(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No traceback; what is short ends with its connection, and others are answered."""

    async def scenario() -> None:
        async with worker() as made, routing(made) as client:
            made.tell = lambda path, body: UNFIT[name] if path == "/odd" else answer(b"{}")
            made.closes = True
            if name.startswith("less"):
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get("/odd")
            else:
                assert (await client.get("/odd")).status_code == int(UNFIT[name][9:12])
            made.closes = False
            assert (await client.get("/v1/models")).json() == {}

    asyncio.run(scenario())
    ours = [each for each in caplog.records if each.name.startswith(("uvicorn", "saccade"))]
    assert not [each for each in ours if each.exc_info], "a traceback"


OFFER = b"connection: Upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
OLD = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
PLAIN = {
    "an offer of another protocol": OK + OFFER + b"content-length: 8\r\n\r\nanswered",
    "such an offer, chunked": CHUNKED[:-2] + OFFER + b"\r\n" + chunk(b"answered") + b"0\r\n\r\n",
    "such an offer, at first": b"HTTP/1.1 103 x\r\n" + OFFER + b"\r\n" + answer(b"answered"),
    "an end by closing": OK + b"\r\nanswered",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\nanswered",
    "a stream by HTTP/1.0": OLD + b"answered",
}


@pytest.mark.sparse(pairs=True)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("relay", [routing, proxying])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_answer_passes_whole_and_without_what_is_of_its_connection(
    name: str, relay: Callable[[Worker], AbstractAsyncContextManager[Any]], version: bytes
) -> None:
    async with worker() as made, relay(made) as client:
        made.tell = lambda path, body: PLAIN[name] if path == "/odd" else answer(b"{}")
        made.closes = True
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        lines = b"host: localhost\r\n" + OFFER + b"content-length: 2\r\n\r\n{}"
        writer.write(b"POST /odd HTTP/" + version + b"\r\n" + lines)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200") and b"upgrade" not in head
        if b"content-length" in head:
            assert await reader.readexactly(8) == b"answered"
        elif version == b"1.0":
            assert b"transfer-encoding" not in head and await reader.read() == b"answered"
        else:
            assert b"transfer-encoding: chunked" in head
            assert await reader.readuntil(b"0\r\n\r\n") == chunk(b"answered") + b"0\r\n\r\n"
        writer.close()
        sent = made.heads[-1].lower()
        assert b"content-length: 2\r\n" in sent
        assert not any(word in sent for word in (b"upgrade", b"http2", b"connection"))


async def test_one_request_that_kills_who_gets_it_does_not_kill_all() -> None:
    """Also where it went by a connection that had been used before, whose worker is gone."""

    async def scenario(stack: AsyncExitStack) -> None:
        made = [await stack.enter_async_context(worker()) for _ in range(5)]
        for each in made:
            each.tell = lambda path, body, each=each: (  # type: ignore[misc]
                answer(b'{"status": "ready"}') if b"poison" not in body else each.die()
            )
        client = await stack.enter_async_context(routing(*made))
        gone = await client.post(CHAT, json={"messages": [], "prompt": "poison"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (502, "worker_lost")
        assert sum(len(each.seen) for each in made) == 2

    async with AsyncExitStack() as stack:
        await scenario(stack)


async def test_a_death_on_an_old_and_on_a_new_connection_is_one_death() -> None:
    """A killed worker's port still takes connections while processes that it leaves hold it."""

    async def scenario(stack: AsyncExitStack) -> None:
        made = [await stack.enter_async_context(worker()) for _ in range(2)]
        client = await stack.enter_async_context(routing(*made))
        for number in range(40):
            assert (await client.post(CHAT, json={"prompt": str(number)})).is_success
        assert all(each.seen for each in made), "both have a connection that was used"
        before = [len(each.seen) for each in made]
        doomed: list[Worker] = []

        def tell(each: Worker, path: str, body: bytes) -> bytes | None:
            if path == "/health":
                return answer(b'{"status": "ready"}')
            doomed.append(each)
            return each.hang_up() if each is doomed[0] else answer(b"{}")

        for each in made:
            each.tell = partial(tell, each)
        assert (await client.post(CHAT, json={"prompt": "late"})).is_success
        assert sorted(len(e.seen) - n for e, n in zip(made, before, strict=True)) == [1, 2]

    async with AsyncExitStack() as stack:
        await scenario(stack)


@pytest.mark.more
async def test_all_but_one_die_at_once_and_everybody_is_answered() -> None:
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(worker()) for _ in range(7)]
        client = None
        async with worker() as last:
            client = await stack.enter_async_context(routing(*made, last))
            asks = [client.post(CHAT, json={"prompt": str(n)}) for n in range(40)]
            assert {each.status_code for each in await asyncio.gather(*asks)} == {200}
            for each in made:
                each.tell = lambda path, body, each=each: each.die()  # type: ignore[misc]
                each.die()
            before = [len(each.seen) for each in made]
            asks = [client.post(CHAT, json={"prompt": str(n)}) for n in range(40)]
            codes = [each.status_code for each in await asyncio.gather(*asks)]
            assert {*codes} <= {200, 502} and codes[-1] == 200
            # Whoever is found dead is not asked again until it says that it lives.
            again = [(await client.post(CHAT, json={"prompt": str(n)})) for n in range(10)]
            assert [each.status_code for each in again] == [200] * 10
            assert sum(len(e.seen) - n for e, n in zip(made, before, strict=True)) <= 80


HEALTH = {
    "nested": answer(b"[" * 60_000, b"503 x"),
    "no text": answer(b'{"status": "\xff"}', b"503 x"),
    "another type": answer(b'{"status": 5, "reason": []}', b"503 x"),
    "a long reason": answer(b'{"status": "x", "reason": "%s"}' % (b"y" * 50_000), b"503 x"),
    "no end": CHUNKED + chunk(b"x" * 100_000),
    "nothing of HTTP": b"\x00",
}


@pytest.mark.first
@pytest.mark.parametrize("name", HEALTH)
async def test_a_worker_whose_health_is_nonsense_is_down_until_it_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "HEALTH_PAUSE", 0.02)
    async with worker() as made, worker() as other:
        made.tell = lambda path, body: HEALTH[name]
        async with routing(made, other) as client:
            for _ in range(3):
                told = await client.get("/health")
                assert told.status_code == 200 and len(told.content) < 2000
                assert told.json()["workers"][0]["status"] == "down"
                assert (await client.post(CHAT, json={})).status_code == 200
                await asyncio.sleep(0.05)
            assert not made.seen
            made.tell = other.tell

            async def is_ready() -> bool:
                told = (await client.get("/health")).json()
                return bool(told["workers"][0]["status"] == "ready")

            await until(is_ready)


@pytest.mark.more
@pytest.mark.parametrize("begun", [b"", STREAM + chunk(b"data: 1\n\ndata: ")])
async def test_a_worker_that_hangs_is_given_up_when_it_says_nothing_at_all(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its answer, or in the middle. One that says how it is may take its time."""
    monkeypatch.setattr(fleet, "HEALTH_PAUSE", 0.05)
    monkeypatch.setattr(fleet, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(fleet, "SILENT_SECONDS", 0.3)
    async with worker() as made:
        hangs = False
        made.tell = lambda path, body: (
            (None if hangs else answer(b"{}")) if path == "/health" else begun or None
        )
        async with routing(made) as client:
            asking = asyncio.create_task(client.post(CHAT, json={}))
            await asyncio.sleep(0.8)
            assert not asking.done()
            hangs = True
            told = await asking
            last = told.text.strip().rpartition("\n\n")[2].removeprefix("data: ")
            assert told.status_code == (200 if begun else 502)
            assert json.loads(last)["error"]["code"] == "worker_lost"
            assert "data: \n" not in told.text


async def test_a_full_router_says_when_to_come_back() -> None:
    async with worker() as made, routing(made, max_requests=1) as client:
        made.tell = lambda path, body: None if b"wait" in body else answer(b"{}")
        waiting = asyncio.create_task(client.post(CHAT, json={"prompt": "wait"}))

        async def has_come() -> bool:
            return bool(made.seen)

        await until(has_come)
        full = await client.post(CHAT, json={})
        assert full.status_code == 429 and full.headers["retry-after"]
        assert (await client.get("/health")).status_code == 200
        waiting.cancel()

        async def is_let_in() -> bool:
            return (await client.post(CHAT, json={})).status_code == 200

        await until(is_let_in)


@pytest.mark.more
async def test_a_flood_of_large_bodies_leaves_a_turn_to_others() -> None:
    """Sixty requests of a megabyte at once; those of somebody else pass between."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode()
    async with worker() as made, routing(made) as client:
        flood = [asyncio.create_task(client.post(CHAT, content=body)) for _ in range(60)]
        await asyncio.sleep(0)
        overtaken = []
        for _ in range(3):
            assert (await client.post(CHAT, json={"prompt": "hi"})).status_code == 200
            overtaken.append(sum(not each.done() for each in flood))
        assert {(await each).status_code for each in flood} <= {200, 429}
        assert overtaken[0] > 0


# ---- what a request is ranked by

WIDE = "x" * 4_000_000 + "\N{PILE OF POO}"
BOMBS = {
    "numbers": b'{"prompt": [' + b"7," * 3_000_000 + b"7]}",
    "lists": b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}",
    "lists within lists": b'{"prompt": [' + (b"[" * 400 + b"]" * 400 + b",") * 8_000 + b"0]}",
    "objects": b'{"system": [' + b'{"a":{}},' * 700_000 + b"0]}",
    "messages": b'{"messages": [' + b"0," * 3_000_000 + b"0]}",
    "salts": b'{"input": "x", "cache_salt": [' + b"{}," * 2_000_000 + b"0]}",
    "parts": b'{"messages": [{"content": [' + b"{}," * 2_000_000 + b"0]}]}",
}


@pytest.mark.parametrize("field", ["url", "text"])
def test_wide_characters_are_not_copied_again_and_again(field: str) -> None:
    """One of them makes four bytes of each character beside it."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + WIDE}}
    part = image if field == "url" else {"type": "text", "text": WIDE}
    body = json.dumps({"messages": [{"content": [part]}]}, ensure_ascii=False).encode()
    tracemalloc.start()
    try:
        assert bearing_of_body(body).keys
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6.5 * len(body)


@pytest.mark.parametrize("name", BOMBS)
def test_the_key_of_a_large_body_takes_little_memory(name: str) -> None:
    body = BOMBS[name]
    tracemalloc.start()
    try:
        found = bearing_of_body(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == AffinityKey() and peak < 1 << 20


def test_only_so_many_parts_are_looked_at() -> None:
    """An image after them decides nothing; a chat goes by how it begins."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    hi = {"role": "user", "content": "hi"}
    fillers: list[list[object]] = [
        [{}],
        [{"content": [[]] * 9}],
        [{"role": "x", "content": [{}] * 9}],
        [0],
    ]
    for between in fillers:
        for count, found in ((10, True), (MAX_PARTS, False)):
            messages = [hi, *between * count, {"role": "user", "content": [image]}]
            with_image, without = (
                bearing_of_body(json.dumps({"messages": each}).encode()).keys
                for each in (messages, messages[:-1])
            )
            assert with_image and without and (with_image != without) == found


def test_what_is_just_within_is_read() -> None:
    tokens = [7] * (MAX_VALUES - 10)
    assert bearing_of_body(json.dumps({"prompt": tokens}).encode()).keys
    assert not bearing_of_body(json.dumps({"prompt": [*tokens, *tokens]}).encode()).keys


@pytest.mark.parametrize("value", ["1" * 5000, "1e400", "[" * 900 + "]" * 900, '"\\ud800"', "null"])
def test_odd_values_anywhere_make_no_key_and_no_fault(value: str) -> None:
    fields = ("messages", "input", "prompt", "system", "instructions", "previous_response_id")
    for field in (*fields, "cache_salt", "prompt_cache_key"):
        bearing_of_body(f'{{"{field}": {value}}}'.encode())
    for inner in ("image_url", "url", "file_id", "uuid", "content", "text", "source", "role"):
        part = f'{{"type": "input_image", "{inner}": {value}}}'
        bearing_of_body(f'{{"messages": [{{"content": [{part}], "role": {value}}}]}}'.encode())
        bearing_of_body(f'{{"input": [{part}]}}'.encode())
    for _, body in BODIES:
        told = msgspec.json.encode(body)
        for cut in range(0, len(told), 97):
            bearing_of_body(told[:cut])
        bearing_of_body(told)
    assert keys.DEEPEST < 100
