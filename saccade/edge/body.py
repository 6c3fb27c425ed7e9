"""Request bodies on their way in: their size, their pace, the bytes held at a time, and the threads
that look into them; and `Admission`, which lets a request in with its permit and its body.

One event loop; no locks.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from saccade.core.client import ANYBODY, SHARE, Client, Permits
from saccade.core.config import MIB
from saccade.core.errors import (
    InvalidRequest,
    Overloaded,
    TooLarge,
    TooSlow,
    UnsupportedMedia,
)
from saccade.core.metrics import Metrics
from saccade.edge.headers import client_of

if TYPE_CHECKING:  # for bodies that name bytes
    from saccade.edge.sent_bytes import SentBytes

BODY_PAUSE = 30.0
BODY_LEAST = 64 * 1024
"""A body must bring so many bytes within so many seconds, or its end."""
SMALL_BODY = 256 * 1024
SMALL_CHUNK = 1 << 12
"""Bytes of a body that are kept as one object, however small the packets were that brought them."""
MAX_ON_LOOP = 1 << 16
"""Bytes of a body that is looked into on the event loop; more goes to a thread."""
LARGE_BODY = 1 << 22
"""Bytes of a body that is looked into while no other such is: that takes a few times its size."""
THREADS = 2
"""For bodies in between."""
SENT_SHARE = 1 / 4
"""Bytes that bodies may name are kept beside those of requests in flight, up to this share."""
RELATED = "multipart/related"
READ = ("application/json", RELATED)
"""Types of bodies that paths with JSON read, as `/version` lists them."""
T = TypeVar("T")
LARGE_SHARE = 7 / 8
"""Requests that hold more than a small body may fill this share of the room; the rest is left to
small ones.
"""


class BodyThreads:
    """Threads that look into bodies. Large bodies have a separate one, so that none waits for them.

    They start with the first work.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "saccade-body")
        self._large = ThreadPoolExecutor(1, "saccade-large-body")

    async def run(self, nbytes: int, work: Callable[[], T]) -> T:
        """Do work on so many bytes, in a thread unless they are few."""
        if nbytes <= MAX_ON_LOOP:
            return work()
        pool = self._pool if nbytes <= LARGE_BODY else self._large
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Drop the work that has not begun."""
        for pool in (self._pool, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


class Bodies:
    """Bytes held for requests in flight, `limit` in all.

    Counts bodies until they are parsed, then encoded images. A body has `seconds` to arrive.
    """

    def __init__(self, limit: int, metrics: Metrics, seconds: float = 300.0) -> None:
        self.limit = limit
        self.seconds = seconds
        self.threads = BodyThreads()
        self.held = 0
        self.of: Counter[str] = Counter()
        """By the name of the key."""
        self._metrics = metrics
        self._sent: SentBytes | None = None

    @property
    def sent(self) -> SentBytes:
        """Return the bytes that bodies may name. The first such body makes the store."""
        if self._sent is None:
            from saccade.edge.sent_bytes import SentBytes

            self._sent = SentBytes(int(self.limit * SENT_SHARE))
        return self._sent

    @contextmanager
    def hold(self, request: Request, largest: int) -> Iterator[BufferedBody]:
        """Yield a share for a body, counted as bytes arrive.

        So a client that announces much and sends little leaves the budget to other clients.

        Raises Overloaded if the announced size exceeds the budget now, before any byte is read.
        """
        with self.share(client_of(request.scope)) as share:
            share.check(min(announced(request), largest))
            yield share

    @contextmanager
    def share(self, client: Client) -> Iterator[BufferedBody]:
        """Yield an empty share, and empty it again at the end."""
        share = BufferedBody(self, client)
        try:
            yield share
        finally:
            if share.watcher is not None:
                share.watcher.close()
            share.resize(0)

    def set(self, held: int) -> None:
        self.held = held
        self._metrics.set("saccade_request_bytes_buffered", held)

    def count_named(self, nbytes: int) -> None:
        """Count bytes that a body named, and show what is kept."""
        self._metrics.inc("saccade_referenced_bytes_total", nbytes)
        self._metrics.set("saccade_stored_body_bytes", self.sent.nbytes)


class BodyWatcher(Protocol):
    """Looks at a body while it arrives, for work that can start before its end
    (`Plugin.body_watcher`).
    """

    def feed(self, piece: bytes) -> None:
        """Look at the next bytes, without waiting: this is the event loop."""

    def end_body(self) -> None:
        """The last bytes are here."""

    async def settle(self, tenant: str) -> None:
        """The body was read: it is `tenant`'s, and so is what was started."""

    def close(self) -> None:
        """The request has ended. Stop and release all that was started."""


@dataclass(slots=True)
class BufferedBody:
    """One request's share."""

    bodies: Bodies
    client: Client = ANYBODY
    nbytes: int = 0
    watcher: BodyWatcher | None = None
    receive_ms: float = 0.0  # from the first look for the body to its last byte

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` bytes. Raises as `check` does."""
        self.check(nbytes)
        change, self.nbytes = nbytes - self.nbytes, nbytes
        self.bodies.set(self.bodies.held + change)
        self.bodies.of[self.client.name] += change

    def check(self, nbytes: int) -> None:
        """Raise Overloaded for more bytes than are left, unless all of them are this request's."""
        self._check_share(nbytes)
        others = self.bodies.held - self.nbytes
        room = self.bodies.limit
        if nbytes > SMALL_BODY:
            room = int(room * LARGE_SHARE)
        if nbytes > self.nbytes and others and others + nbytes > room:
            raise Overloaded(
                f"requests in flight hold {others / MIB:.0f} MiB and this one needs "
                f"{nbytes / MIB:.0f}; the limit is {self.bodies.limit / MIB:.0f} "
                "(--max-inflight-mb): try again, or upload images with /v1/files"
            )

    def reserve(self, nbytes: int) -> None:
        """Hold `nbytes` more, for content from elsewhere (files, URLs), counted once per mention.

        Raises Overloaded beyond the bytes left now, TooLarge beyond the limit.
        """
        if nbytes > 0 and self.nbytes + nbytes > self.bodies.limit:
            raise TooLarge(
                f"the request and its images have over {self.bodies.limit / MIB:.0f} MiB, the "
                "limit for all requests in flight (--max-inflight-mb): send fewer, or smaller ones"
            )
        self.resize(self.nbytes + nbytes)

    async def settle(self, tenant: str) -> None:
        """Pass on whose request this is, once its body was read."""
        if self.watcher is not None:
            await self.watcher.settle(tenant)

    def sent(self, tenant: str, name: str) -> bytes | None:
        """Return bytes that the client's tenant has sent under their digest's name, if kept."""
        return self.bodies.sent.find(self.client.name, tenant, name)

    def _check_share(self, nbytes: int) -> None:
        """Raise Overloaded if one of several keys would hold more than its share."""
        mine, most = self.bodies.of[self.client.name] - self.nbytes, self.bodies.limit * SHARE
        if self.client.limited and mine and nbytes > self.nbytes and mine + nbytes > most:
            raise Overloaded(
                f"requests of this API key hold {mine / MIB:.0f} MiB and this one needs "
                f"{nbytes / MIB:.0f}; the limit for one of several keys is {most / MIB:.0f} (half "
                "of --max-inflight-mb): try again"
            )


async def read_whole(request: Request, held: BufferedBody, largest: int) -> bytearray:
    """Read the whole body, whatever its type. Raises as `pieces` does.

    Bytes are copied once, when all are here: a buffer that grows is moved each time that the memory
    behind it is taken, which moves seven times the bytes of bodies that arrive at the same time.
    """
    arrived: list[bytes] = []
    async for piece in pieces(request, held, largest):
        if arrived and len(arrived[-1]) + len(piece) <= SMALL_CHUNK:
            arrived[-1] += piece
        else:
            arrived.append(piece)
        if held.watcher is not None:
            held.watcher.feed(piece)
    if held.watcher is not None:
        held.watcher.end_body()
    return bytearray().join(arrived)


async def read_json(request: Request, held: BufferedBody, largest: int) -> bytearray:
    """Read the whole body, without the byte order mark that some editors write.

    A body may name bytes (`related.py`). Raises as `pieces` does, InvalidRequest unless the content
    type is JSON, and UnsupportedMedia for a compressed body.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMedia(
            f"Content-Encoding is {encoding[:40]}; compressed bodies are not supported"
        )
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind == RELATED:
        return await _read_related(request, held, largest)
    if kind != "application/json":
        raise InvalidRequest(
            f"Content-Type is {kind}; this endpoint requires application/json",
            code="unsupported_media_type",
        )
    body = await read_whole(request, held, largest)
    if body.startswith(codecs.BOM_UTF8):
        del body[: len(codecs.BOM_UTF8)]
    return body


async def _read_related(request: Request, held: BufferedBody, largest: int) -> bytearray:
    """Read a body that names bytes, and return the JSON that has them. Raises as `read_json`, and
    UnknownDigests.
    """
    from saccade.edge.related import RelatedBody, boundary_of

    boundary = boundary_of(request.headers["content-type"])
    body = await read_whole(request, held, largest)
    threads = held.bodies.threads
    parts = await threads.run(len(body), partial(RelatedBody, body, boundary))
    found = parts.find(held.bodies.sent, held.client)
    size = parts.size(found)
    if size > largest:
        raise _too_large(largest)
    held.resize(len(body) + size)
    whole = await threads.run(size, partial(parts.whole, found))
    held.bodies.count_named(sum(len(found[name]) for name in found.keys() - parts.brought.keys()))
    held.resize(size)
    return whole


def announced(request: Request) -> int:
    """Return the body's bytes by its header, or 0 if the header leaves them open."""
    length = request.headers.get("content-length", "0")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


async def pieces(request: Request, held: BufferedBody, largest: int) -> AsyncGenerator[bytes, None]:
    """Yield the body, piece by piece. Each piece is counted as held before its use.

    Raises TooLarge by the announced or the real length, Overloaded, and TooSlow. The connection
    discards the rest of a refused body.
    """
    size, started = announced(request), time.monotonic()
    if size <= largest:
        size = 0
        async for piece in _steadily(request, held.bodies.seconds):
            size += len(piece)
            if size > largest:
                break
            held.resize(max(size, held.nbytes))
            yield piece
        held.receive_ms = (time.monotonic() - started) * 1e3
    if size > largest:
        raise _too_large(largest)


def _too_large(largest: int) -> TooLarge:
    if largest < MIB:  # below the option's resolution
        return TooLarge(f"the body is larger than {largest >> 10} KiB, the limit of this endpoint")
    return TooLarge(f"the body is larger than {largest // MIB} MiB, the limit (--max-body-mb)")


async def _steadily(request: Request, seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield chunks. Raises TooSlow if they stop arriving, or do not end within `seconds`."""
    chunks = request.stream()
    now = asyncio.get_running_loop().time
    end = now() + seconds
    due, came = now() + BODY_PAUSE, 0
    while True:
        try:
            async with asyncio.timeout_at(min(due, end)):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if now() < end:
                raise TooSlow(
                    f"the body arrives too slowly: {came} bytes in {BODY_PAUSE:g} seconds"
                ) from None
            raise TooSlow(
                f"the body did not arrive within {seconds:g} seconds, the limit (--tune "
                "body_timeout)"
            ) from None
        came += len(chunk)
        if came >= BODY_LEAST:
            due, came = now() + BODY_PAUSE, 0
        yield chunk


ReadBody = Callable[[Request, BufferedBody, int], Awaitable[bytearray]]


@dataclass(frozen=True, slots=True)
class Admission:
    """Admits requests with bodies. `largest`: bytes in a body.

    `check_ready` raises an EngineUnavailable while answers are impossible.
    """

    permits: Permits
    bodies: Bodies
    largest: int
    check_ready: Callable[[], object]

    @asynccontextmanager
    async def admit(
        self, scope: Scope, receive: Receive, read: ReadBody = read_json
    ) -> AsyncIterator[tuple[bytearray, BufferedBody]]:
        """Read the body, then take a permit.

        So a client that sends slowly leaves permits to others. A full server refuses before the
        body. Memory that the request holds counts until the end.

        Raises what `check_ready`, `Permits.acquire`, `Bodies.hold` and `read` do.
        """
        request, client = Request(scope, receive), client_of(scope)
        self.check_ready()
        self.permits.check(client)
        with self.bodies.hold(request, self.largest) as held:
            body = await read(request, held, self.largest)
            self.check_ready()
            with self.permits.acquire(client):
                yield body, held


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result.

    Cancels it and raises ClientDisconnect if the client leaves.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        # The request's resources are free only once its work has really ended.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
