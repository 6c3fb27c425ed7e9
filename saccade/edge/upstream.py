"""Pools HTTP connections from a router to one worker, over which requests and responses pass
unchanged.

This module also limits the bytes of a response that are buffered for a slow client. Its errors
distinguish whether a worker disconnected before or after the first byte of a response. Everything
runs on one event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from saccade.core.errors import ConfigError
from saccade.core.shown_url import shown_url

CONNECT_SECONDS = 2.0
MAX_IDLE = 64
"""Maximum number of idle connections to one worker."""
IDLE_SECONDS = 30.0
"""How long a connection may be idle. This is less than the worker's `keep_alive_timeout`, after
which the worker closes it.
"""
MAX_WAITING = 256 * 1024
"""Reading from the worker pauses while more than this many bytes of a response are buffered for a
slow client.
"""
PIECE_BYTES = 64
"""Memory overhead of each buffered chunk, in bytes."""
MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of headers or chunk framing without any body bytes in between, in bytes."""

Headers = list[tuple[bytes, bytes]]


class WorkerDisconnected(Exception):
    """The worker has closed the connection, or cannot be reached.

    sent: True if the worker may have received the request.
    begun: True if a part of the response had arrived.
    stale: True if the connection had been idle. The worker may have closed it only for that reason.
    """

    def __init__(
        self, message: str, sent: bool = True, begun: bool = False, stale: bool = False
    ) -> None:
        super().__init__(message)
        self.sent = sent
        self.begun = begun
        self.stale = stale


@dataclass(frozen=True, slots=True)
class Head:
    """The status and headers of the worker's response."""

    status: int
    headers: Headers


class _Wire(asyncio.Protocol):
    """One connection to a worker, which handles one request at a time."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.ended = False
        self.lost = ""
        self.used = False
        self._headers: Headers = []
        self._framing_bytes = 0  # bytes since the last body bytes
        self._pieces: list[bytes] = []
        self._waiting = 0
        self._paused = False
        self._bodiless = False
        self._kept = False  # keep-alive, according to the response
        self._parser = httptools.HttpResponseParser(self)
        self._wakeup: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    # ---- transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), MAX_HEADER_BYTES):
                self._feed(data[start : start + MAX_HEADER_BYTES])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(f"not an HTTP response: {error.__context__ or error}")
        self._wake()

    def _feed(self, data: bytes) -> None:
        if self.ended:
            raise httptools.HttpParserError("unexpected data without a request")
        self._framing_bytes += len(data)
        self._parser.feed_data(data)
        if self._framing_bytes > MAX_HEADER_BYTES and not self.ended:
            raise httptools.HttpParserError(
                f"{MAX_HEADER_BYTES} bytes of headers received, the limit"
            )

    def eof_received(self) -> bool:
        if self.head is not None and not self._framed:
            self.ended = True  # without a length, the response ends with its connection
        self._lose("it closed the connection")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc or "it closed the connection"))

    # ---- parser callbacks

    def on_message_begin(self) -> None:
        if self.ended:
            raise httptools.HttpParserError("unexpected response without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is None:  # otherwise it is a trailer, which is ignored
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            raise httptools.HttpParserError(f"its status is {status}")
        if status < 200:
            self._headers = []
            return
        self.head = Head(status, self._headers)
        # At the end of the message, the parser no longer has this information.
        self._kept = self._parser.should_keep_alive()
        self.ended = self._bodiless

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._pieces.append(body)
        self._waiting += len(body) + PIECE_BYTES
        if self._waiting > MAX_WAITING and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.ended = self.head is not None

    # ---- requests

    def send_request(self, method: bytes, head: bytes, body: bytes | bytearray) -> None:
        assert self._transport is not None
        self.head, self.ended, self._headers, self._framing_bytes = None, False, [], 0
        self._bodiless = method == b"HEAD"
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(head)
        if body:
            self._transport.write(body)

    async def answered(self) -> Head:
        """Wait for the status and headers of the response and return them.

        Raises WorkerDisconnected if the connection is closed before they have arrived.
        """
        while self.head is None:
            if self.lost:
                raise WorkerDisconnected(self.lost, begun=bool(self._headers))
            await self._wait()
        return self.head

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield chunks of the response's body as they arrive.

        Raises WorkerDisconnected if the connection is lost before the body is complete.
        """
        while True:
            while self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                self._waiting = 0
                yield piece
            if self.ended:
                return
            if self.lost:
                raise WorkerDisconnected(self.lost, begun=True)
            if self._paused and self._transport is not None:
                self._paused = False
                self._transport.resume_reading()
            await self._wait()

    @property
    def reusable(self) -> bool:
        """True if the connection can be used for another request."""
        if self._transport is None or self._transport.is_closing() or self.lost:
            return False
        sent = not self._transport.get_write_buffer_size()
        whole = self.ended and not self._pieces and not self._bodiless and not self._paused
        return sent and whole and self._framed and self._kept

    def close(self) -> None:
        """Close the connection immediately, which tells the worker that the client has
        disconnected.
        """
        if self._transport is not None:
            self._transport.abort()

    @property
    def _framed(self) -> bool:
        if self.head is None:
            return False
        names = {name for name, _ in self.head.headers}
        bodiless = self.head.status in (204, 304)
        return bodiless or bool(names & {b"content-length", b"transfer-encoding"})

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def _wait(self) -> None:
        self._wakeup = asyncio.get_running_loop().create_future()
        await self._wakeup


class Upstream:
    """A pool of connections to the worker at `host`:`port`. If `tls` is set, connections use it and
    verify the certificate.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._idle: deque[tuple[float, _Wire]] = deque()  # longest idle first
        self._busy: set[_Wire] = set()

    @asynccontextmanager
    async def exchange(
        self, method: bytes, head: bytes, body: bytes | bytearray = b"", again: bool = True
    ) -> AsyncIterator[tuple[Head, AsyncIterator[bytes]]]:
        """Send a request. Yield the headers of the response, and its body as it arrives.

        If the context ends before the body does, the connection is closed.

        If the worker has closed a stale connection before any part of a response has arrived, and
        `again` is set, the request is sent once more over a new connection. Raises
        WorkerDisconnected if the worker disconnects in any other case.
        """
        wire = self._acquire()
        if wire is None:
            wire = await self._connect()
        try:
            self._busy.add(wire)
            wire.send_request(method, head, body)
            try:
                answer = await wire.answered()
            except WorkerDisconnected as gone:
                if gone.begun or not wire.used:
                    raise
                self._end_idle()  # the others are as old, and may be closed, too
                if not again:
                    raise WorkerDisconnected(str(gone), stale=True) from None
                self._busy.discard(wire)
                wire = await self._connect()
                self._busy.add(wire)
                wire.send_request(method, head, body)
                answer = await wire.answered()
            yield answer, wire.pieces()
        finally:
            self._busy.discard(wire)
            self._release(wire)

    def drop(self) -> None:
        """Close all connections. Requests in flight raise WorkerDisconnected."""
        for wire in self._busy:
            wire.close()
        self._end_idle()

    def _end_idle(self) -> None:
        for _, wire in self._idle:
            wire.close()
        self._idle.clear()

    async def _connect(self) -> _Wire:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, wire = await loop.create_connection(_Wire, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            why = f"no connection within {self._connect_seconds:g} s"
            raise WorkerDisconnected(why, sent=False) from None
        except OSError as error:
            raise WorkerDisconnected(str(error), sent=False) from None
        return wire

    def _acquire(self) -> _Wire | None:
        now = asyncio.get_running_loop().time()
        while self._idle and (self._idle[0][0] < now - IDLE_SECONDS or self._idle[0][1].lost):
            self._idle.popleft()[1].close()
        while self._idle:
            _, wire = self._idle.pop()
            if not wire.lost:
                return wire
        return None

    def _release(self, wire: _Wire) -> None:
        if wire.reusable and len(self._idle) < MAX_IDLE:
            wire.used = True
            self._idle.append((asyncio.get_running_loop().time(), wire))
        else:
            with suppress(OSError):
                wire.close()


def parse_worker(url: str, option: str = "--workers") -> tuple[str, str, int]:
    """Return the name, host and port of a server from its URL, with or without /v1. Raises
    ConfigError.

    option: the command-line option, for the error message.
    """
    shown = shown_url(url)
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:
        why = "write http://HOST:PORT" if "@" in url else str(error)  # which may quote the password
        raise ConfigError(f"{option} {shown!r}: {why}") from None
    if parts.scheme != "http":
        raise ConfigError(
            f"{option} {shown!r}: servers use plain HTTP: write http://HOST:PORT (TLS between "
            "servers is not supported: use a private network)"
        )
    beside = parts.path.rstrip("/") not in ("", "/v1") or parts.query or parts.fragment
    if not host or beside or "@" in parts.netloc:
        raise ConfigError(f"{option} {shown!r}: write http://HOST:PORT")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", host, port
