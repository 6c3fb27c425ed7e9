"""Reads request bodies, with limits on size, duration and total memory, and parses them in threads.

`Admission` reads the body of a request, and counts the request as in flight. Everything runs on one
event loop, so there are no locks.
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

if TYPE_CHECKING:  # imported by bodies that refer to stored bytes
    from saccade.edge.sent_bytes import SentBytes

BODY_PAUSE = 30.0
BODY_LEAST = 64 * 1024
"""A body is rejected if fewer than `BODY_LEAST` bytes of it arrive within `BODY_PAUSE` seconds,
unless it ends.
"""
SMALL_BODY = 256 * 1024
SMALL_CHUNK = 1 << 12
"""Small packets of a body are merged into objects of up to this many bytes."""
MAX_ON_LOOP = 1 << 16
"""Maximum size in bytes of a body that is parsed on the event loop. Larger bodies are parsed in a
thread.
"""
LARGE_BODY = 1 << 22
"""Bodies with more bytes than this are parsed one at a time, because parsing takes several times
their memory.
"""
THREADS = 2
"""Number of threads that parse bodies with sizes between `MAX_ON_LOOP` and `LARGE_BODY`."""
SENT_SHARE = 1 / 4
"""Memory for bytes that later bodies can refer to, as a fraction of the limit on bytes in flight.
It is in addition to that limit.
"""
RELATED = "multipart/related"
READ = ("application/json", RELATED)
"""Content types that JSON endpoints accept. `/version` lists them."""
T = TypeVar("T")
LARGE_SHARE = 7 / 8
"""Fraction of the limit on bytes in flight that bodies over `SMALL_BODY` bytes may use. The rest is
reserved for smaller ones.
"""


class BodyThreads:
    """Threads that parse request bodies. Large bodies have a separate thread, so that other bodies
    do not wait for them.

    The threads start when they are first used.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "saccade-body")
        self._large = ThreadPoolExecutor(1, "saccade-large-body")

    async def run(self, nbytes: int, work: Callable[[], T]) -> T:
        """Call `work` and return its result. Runs it in a thread unless `nbytes`, the size of the
        body, is small.
        """
        if nbytes <= MAX_ON_LOOP:
            return work()
        pool = self._pool if nbytes <= LARGE_BODY else self._large
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Cancel calls of `run` that have not started, and stop the threads."""
        for pool in (self._pool, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


class Bodies:
    """Counts the bytes buffered for all requests in flight, at most `limit`.

    A request's bytes are its body until the body is parsed, and then its encoded images. `seconds`
    is the maximum time until a body has arrived completely.
    """

    def __init__(self, limit: int, metrics: Metrics, seconds: float = 300.0) -> None:
        self.limit = limit
        self.seconds = seconds
        self.threads = BodyThreads()
        self.held = 0
        self.of: Counter[str] = Counter()
        """The number of buffered bytes, by the name of the API key."""
        self._metrics = metrics
        self._sent: SentBytes | None = None

    @property
    def sent(self) -> SentBytes:
        """Stored bytes that bodies may refer to. Created at first use."""
        if self._sent is None:
            from saccade.edge.sent_bytes import SentBytes

            self._sent = SentBytes(int(self.limit * SENT_SHARE))
        return self._sent

    @contextmanager
    def hold(self, request: Request, largest: int) -> Iterator[BufferedBody]:
        """Yield a `BufferedBody` for the body of `request`, which counts bytes as they arrive.

        A client that announces a large body but sends little of it thus takes little of the limit.

        Raises Overloaded before any byte is read if the announced size exceeds what is available
        now. largest: the maximum size of a body.
        """
        with self.share(client_of(request.scope)) as share:
            share.check(min(announced(request), largest))
            yield share

    @contextmanager
    def share(self, client: Client) -> Iterator[BufferedBody]:
        """Yield an empty `BufferedBody`, to which the caller adds bytes. They are released when the
        context ends.
        """
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
        """Count `nbytes` stored bytes that a body referred to, and update the gauge of stored
        bytes.
        """
        self._metrics.inc("saccade_referenced_bytes_total", nbytes)
        self._metrics.set("saccade_stored_body_bytes", self.sent.nbytes)


class BodyWatcher(Protocol):
    """Inspects a body while it arrives, to start work before the body is complete
    (`plugin.Http.body_watcher`).
    """

    def feed(self, piece: bytes) -> None:
        """Inspect the next bytes. Called on the event loop, so it must not block."""

    def end_body(self) -> None:
        """Handle the end of the body. Called after the last bytes."""

    async def settle(self, tenant: str) -> None:
        """Assign the body, and the work that it started, to `tenant`. Called after the last
        bytes.
        """

    def close(self) -> None:
        """Stop the work and release everything, because the request has ended."""


@dataclass(slots=True)
class BufferedBody:
    """The bytes buffered for one request, as a part of the limit for all requests."""

    bodies: Bodies
    client: Client = ANYBODY
    nbytes: int = 0
    watcher: BodyWatcher | None = None
    receive_ms: float = 0.0  # from the first read of the body to its last byte

    def resize(self, nbytes: int) -> None:
        """Set the number of buffered bytes. Raises Overloaded if `nbytes` exceeds what is
        available.
        """
        self.check(nbytes)
        change, self.nbytes = nbytes - self.nbytes, nbytes
        self.bodies.set(self.bodies.held + change)
        self.bodies.of[self.client.name] += change

    def check(self, nbytes: int) -> None:
        """Raise Overloaded if this request may not buffer `nbytes` bytes now.

        A request is always accepted while no other request has buffered bytes.
        """
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
        """Count `nbytes` more bytes, of content from files or URLs. Content counts each time the
        request refers to it.

        Raises Overloaded if the bytes exceed what is available now, and TooLarge if they exceed the
        limit.
        """
        if nbytes > 0 and self.nbytes + nbytes > self.bodies.limit:
            raise TooLarge(
                f"the request and its images have over {self.bodies.limit / MIB:.0f} MiB, the "
                "limit for all requests in flight (--max-inflight-mb): send fewer, or smaller ones"
            )
        self.resize(self.nbytes + nbytes)

    async def settle(self, tenant: str) -> None:
        """Tell the body's watcher, if any, the tenant of the request. Called once the body has been
        read.
        """
        if self.watcher is not None:
            await self.watcher.settle(tenant)

    def sent(self, tenant: str, name: str) -> bytes | None:
        """Return bytes that the client's tenant has sent before, by their digest `name`, or None if
        they are not stored.
        """
        return self.bodies.sent.find(self.client.name, tenant, name)

    def _check_share(self, nbytes: int) -> None:
        """Raise Overloaded if one of several API keys would have more than its share of the
        buffered bytes.
        """
        mine, most = self.bodies.of[self.client.name] - self.nbytes, self.bodies.limit * SHARE
        if self.client.limited and mine and nbytes > self.nbytes and mine + nbytes > most:
            raise Overloaded(
                f"requests of this API key hold {mine / MIB:.0f} MiB and this one needs "
                f"{nbytes / MIB:.0f}; the limit for one of several keys is {most / MIB:.0f} (half "
                "of --max-inflight-mb): try again"
            )


async def read_whole(request: Request, held: BufferedBody, largest: int) -> bytearray:
    """Read the entire body, whatever its content type.

    Raises TooLarge, TooSlow, or Overloaded if the bytes exceed what is available.

    Bytes are copied once, after the last one has arrived. A growing buffer would be moved whenever
    the memory after it is in use. If several bodies arrive at once, that copies seven times the
    bytes. The final copy runs in a thread, because copying 30 MiB takes tens of milliseconds.
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
    size = sum(map(len, arrived))
    return await held.bodies.threads.run(size, partial(bytearray().join, arrived))


async def read_json(request: Request, held: BufferedBody, largest: int) -> bytearray:
    """Read a JSON body, without the byte order mark that some editors write.

    The body may refer to stored bytes (`related.py`). Raises InvalidRequest for other content
    types, UnsupportedMedia for a compressed body, and the errors of `read_whole`.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMedia(
            f"Content-Encoding {encoding[:40]} is not supported: send the body uncompressed"
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
    """Read a multipart/related body. Return its JSON, with references replaced by base64 of the
    bytes.

    Raises InvalidRequest if the body is malformed, UnknownDigests if it refers to bytes that are
    not stored, and TooLarge, TooSlow or Overloaded.
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
    """Return the body's size according to its Content-Length header, or 0 if that is missing or
    invalid.
    """
    length = request.headers.get("content-length", "0")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


async def pieces(request: Request, held: BufferedBody, largest: int) -> AsyncGenerator[bytes, None]:
    """Yield the body in chunks. Each chunk is counted in `held` before it is yielded.

    Raises TooLarge if the announced or the actual size exceeds `largest`, and Overloaded and
    TooSlow. The connection discards the rest of a rejected body.
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
    """Yield chunks. Raises TooSlow if they arrive too slowly, or if the body takes more than
    `seconds`.
    """
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
    """Reads bodies of at most `largest` bytes, and limits the requests in flight.

    `check_ready` raises EngineUnavailable if no request can be served.
    """

    permits: Permits
    bodies: Bodies
    largest: int
    check_ready: Callable[[], object]

    @asynccontextmanager
    async def admit(
        self, scope: Scope, receive: Receive, read: ReadBody = read_json
    ) -> AsyncIterator[tuple[bytearray, BufferedBody]]:
        """Read the body with `read`, then count the request as in flight until the context ends.

        A client that sends slowly therefore does not count as in flight. If the server is full, the
        request is rejected before its body is read.

        Raises EngineUnavailable if no request can be served, Overloaded if the server is full, and
        the errors of `read`.
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

    If the client disconnects first, cancel `work` and raise ClientDisconnect.
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
        # The request's resources can be released only after its work has ended.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
