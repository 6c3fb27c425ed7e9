"""One HTTP connection: uvicorn's class, with limits on reading.

uvicorn passes every received byte to its parser, and does not limit the bytes that are buffered. In
this module, the parser gets the bytes of one message at a time, starting with headers of limited
size. The next message is not parsed until the current one has been answered. There are timeouts for
headers that do not arrive, responses that are not read, and bodies that continue after an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast

import httptools
from starlette.datastructures import Headers
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from saccade.core.errors import (
    HeadTooLarge,
    InvalidRequest,
    Overloaded,
    RequestError,
    TooSlow,
)
from saccade.core.options import ConnectionOptions
from saccade.edge.headers import Stamp, name_of
from saccade.edge.limits import ConnectionLimiter
from saccade.edge.listener import TURNS_TO_READ
from saccade.edge.refusal import refusal

HEAD_BYTES = 32 * 1024
"""Maximum size of the request line with all headers, in bytes. Also the maximum size of chunk
framing without body bytes in between.
"""
HEAD_LINES = 128
"""Maximum number of headers in a request."""
PIECE = 8192
"""How many bytes of headers and chunk framing are parsed for one connection before other
connections are served.
"""
MEAN_CHUNK, MEAGRE_PIECE = 64, 1024
"""If the chunks of a body have at most `MEAN_CHUNK` bytes on average, only `MEAGRE_PIECE` bytes are
parsed at a time, because each chunk costs a function call.
"""
MEAGRE, MEAGRE_CHUNKS = 32, 4_000
"""A body with more than `MEAGRE_CHUNKS` chunks is rejected if they have less than `MEAGRE` bytes on
average.
"""
LINGER_SECONDS = 20.0
"""How long a client may continue sending after an error response before it is disconnected."""
EMPTY_LINE = b"\r\n\r\n"
_FRAMING = (b"content-length", b"transfer-encoding")


@dataclass(slots=True)
class _Message:
    # bytes passed to the parser: of the head or, in a chunked body, since the last body bytes
    given: int = 0
    lines: int = 0  # headers
    chunks: int = 0  # chunks of a chunked body
    content: int = 0  # bytes in these chunks
    tail: bytes = b""  # the last bytes passed to the parser, to find an empty line
    in_body: bool = False
    ended: bool = False
    # remaining bytes of the body; None in the head, or if the body is chunked
    left: int | None = None
    keep_alive: bool = True  # True if the client supports another request on the connection
    refused: RequestError | None = None  # why the request is rejected
    # parses the body if an upgrade is offered, where the connection's parser would stop
    body_parser: httptools.HttpRequestParser | None = None

    @property
    def meagre(self) -> bool:
        """True if the body is chunked and its chunks are small, or if no chunk has arrived yet."""
        return self.in_body and self.left is None and self.content <= MEAN_CHUNK * self.chunks


class _Outlet:
    """Wraps the transport of a response, and counts bytes to detect a client that does not read
    them.
    """

    def __init__(self, transport: asyncio.Transport, on_close: Callable[[], None]) -> None:
        self._transport = transport
        self._on_close = on_close
        self._written = 0
        self._taken = 0
        self._since = 0.0

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._written += len(data)
            self._transport.write(data)

    def close(self) -> None:
        self._on_close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def stalled(self, now: float) -> float:
        """Return the number of seconds since the client last read any of the buffered bytes."""
        waiting = self._transport.get_write_buffer_size()
        taken = self._written - waiting
        if not waiting or taken > self._taken or not self._since:
            self._taken, self._since = taken, now
        return now - self._since


class _UnframedSend:
    """Sends a response to an HTTP/1.0 client, which does not support chunked encoding (RFC 9112,
    6.1).

    A response without Content-Length ends when the connection is closed.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(
                name == b"content-length" for name, _ in message.get("headers", ())
            )
        if not self._has_length:
            # uvicorn then writes each chunk without framing.
            self._cycle.chunked_encoding = False
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class _Flow(FlowControl):
    """uvicorn's flow control, except that `Connection` decides when to resume reading."""

    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_resume = on_resume

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            super().pause_reading()

    def resume_reading(self) -> None:
        self._on_resume()

    def open(self) -> None:
        if not self._transport.is_closing():
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """One HTTP connection with limits on reading.

    largest: maximum number of bytes that are still read of a rejected body.
    open_paths: the only paths that connections over the connection limit can request.
    stamp: adds headers to responses that the connection itself sends.
    """

    def __init__(
        self,
        crowd: ConnectionLimiter,
        options: ConnectionOptions,
        largest: int,
        open_paths: frozenset[bytes],
        stamp: Stamp,
        **uvicorns: object,
    ) -> None:
        super().__init__(**uvicorns)  # type: ignore[arg-type]
        self._limiter = crowd
        self._options = options
        self._largest = largest
        self._open_paths = open_paths
        self._stamp = stamp
        self._within_limits = True
        self._message = _Message()
        self._surplus = bytearray()  # bytes that the parser has not received yet
        self._counted = 0  # how many of these the limiter has counted
        self._deadline: float | None = None  # for receiving headers, or the rest of a rejected body
        self._lingering: int | None = None  # remaining bytes to discard
        self._outlet = cast(_Outlet, None)
        self._stopping = False
        # new: nothing has been read yet; soon: a call of `_pump` is scheduled
        self._due: Literal["", "new", "soon"] = "new"
        self.url = b""  # uvicorn sets it only when a request starts

    @property
    def waits(self) -> bool:
        return self._due == "new" or (self._due == "soon" and not self._message.meagre)

    def _age(self, turns: int) -> None:
        if turns:
            self.loop.call_soon(self._age, turns - 1)
        elif self._due == "new":
            self._due = ""

    # ---- transport callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._outlet = _Outlet(transport, self._finish)
        self.flow = _Flow(transport, self._pump_soon)
        self._deadline = self.loop.time() + self._options.header_timeout
        self._age(TURNS_TO_READ)
        self._within_limits = self._limiter.join(self, self.client[0] if self.client else "")

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.leave(self)
        self._drop_surplus()
        self._lingering = 0
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            self._lingering -= len(data)
            if self._lingering < 0:
                self.drop("body")
            else:
                self.flow.pause_reading()
                self._limiter.soon(self.flow.open)  # type: ignore[attr-defined]
            return
        left = self._message.left
        if not self._surplus and left is not None and len(data) <= left:
            self._message.left = left - len(data)
            self._parse(data)  # the common case: part of a body, which needs no parsing
            return
        self._surplus += data
        if not self._message.meagre and self._limiter.at_once():
            self._pump()
        else:
            self.flow.pause_reading()
            self._pump_soon()

    def shutdown(self) -> None:
        self._stopping = True
        if self._lingering is not None:
            self.transport.abort()
        else:
            super().shutdown()

    # ---- message by message

    def _pump_soon(self) -> None:
        if not self._surplus:
            self.flow.open()  # type: ignore[attr-defined]
        elif self._due != "soon":
            self._due = "soon"
            self._limiter.soon(self._pump)

    def _pump(self) -> None:
        """Pass received bytes of the current message to the parser. Bytes of later messages stay
        buffered.
        """
        self._due = ""
        budget = PIECE
        while self._surplus and budget > 0 and self._lingering is None:
            if self._message.ended:
                if not self.cycle.response_complete:
                    break
                # After a trailer, the parser may ignore further messages.
                self._message, self.parser = _Message(), httptools.HttpRequestParser(self)
            elif self._is_full():
                break
            budget -= self._feed()
            if self._message.meagre:
                budget = 0
        if self._lingering is not None or self.transport.is_closing():
            self._drop_surplus()
        elif not self._surplus and not self._is_full():
            self._count_surplus()
            self.flow.open()  # type: ignore[attr-defined]
        else:
            self.flow.pause_reading()
            if self._message.ended and not self._count_surplus():
                # The buffers are full. The client can send the request again after this response.
                self._drop_surplus()
                self.cycle.keep_alive = self._message.keep_alive = False
            elif budget <= 0:
                self._pump_soon()

    def _is_full(self) -> bool:
        message = self._message
        unread = len(self.cycle.body) if message.in_body and not message.ended else 0
        return unread > HIGH_WATER_LIMIT

    def _feed(self) -> int:
        """Pass the next part of the buffered bytes to the parser.

        Returns how many of them are headers or chunk framing. The parser examines these one by one,
        which takes the longest.
        """
        message, surplus = self._message, self._surplus
        self._unset_keepalive_if_required()
        if not message.in_body and self._deadline is None:
            self._deadline = self.loop.time() + self._options.header_timeout
        if message.left is not None:
            size, cost = min(message.left, len(surplus)), 0
            message.left -= size
        else:
            # Heads and chunked bodies end with an empty line.
            size = min(MEAGRE_PIECE if message.meagre else PIECE, len(surplus))
            end = (message.tail + surplus[:size]).find(EMPTY_LINE)
            if end >= 0:
                size = end + len(EMPTY_LINE) - len(message.tail)
            message.tail = (message.tail + surplus[:size])[-3:]
            message.given += size
            cost = size + 64
        piece = bytes(surplus) if size == len(surplus) else bytes(surplus[:size])
        del surplus[:size]
        self._parse(piece)
        return cost

    def _parse(self, piece: bytes) -> None:
        message = self._message
        try:
            (message.body_parser or self.parser).feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # the upgrade is declined, and `body_parser` continues
        except httptools.HttpParserError as error:
            message.refused = message.refused or InvalidRequest(
                f"the request is not valid HTTP: {error}", code="invalid_http"
            )
        if message.left == 0 and not message.ended and message.refused is None:
            message.refused = InvalidRequest(
                "the body does not have the length in Content-Length", code="invalid_http"
            )
        if message.chunks > MEAGRE_CHUNKS and message.content < MEAGRE * message.chunks:
            message.refused = message.refused or InvalidRequest(
                f"the body has over {MEAGRE_CHUNKS} chunks of under {MEAGRE} bytes: send larger "
                "chunks",
                code="invalid_http",
            )
        if message.given > HEAD_BYTES and message.refused is None:
            message.refused = HeadTooLarge(
                f"request line and headers, or chunk framing, exceed {HEAD_BYTES} bytes"
            )
        if message.refused is not None:
            self._refuse(message.refused)

    # ---- parser callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._message.in_body:
            return  # a trailer, which is ignored and must not be taken for a header
        self._message.lines += 1
        if self._message.lines <= HEAD_LINES:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        message = self._message
        message.refused = self._check_head()
        if message.refused is not None:
            return
        self._deadline = None
        self._limiter.busy(self)
        super().on_headers_complete()
        # A redirect would discard the body, and have http:// even behind a proxy with TLS.
        self.scope["path"] = self.scope["path"].rstrip("/") or "/"
        names = dict(self.headers)
        message.in_body, message.given, message.tail = True, 0, b""
        if b"transfer-encoding" not in names:
            message.left = int(names.get(b"content-length", b"0"))
        self.cycle.transport = cast(asyncio.Transport, self._outlet)
        message.keep_alive = self.cycle.keep_alive and self._within_limits
        # A response that is sent before the whole body has arrived closes the connection.
        self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":
            self.cycle.waiting_for_100_continue = False
            self.cycle.send = _UnframedSend(self.cycle)  # type: ignore[method-assign]
        if self.parser.should_upgrade():
            message.body_parser = self._body_parser()

    def _body_parser(self) -> httptools.HttpRequestParser:
        """Return a parser for the body of a request whose headers offer an upgrade.

        The new parser has parsed the framing headers without the offer, so the request is handled
        as if it had not been offered (RFC 9110, 7.8).
        """
        framing = [name + b": " + value for name, value in self.headers if name in _FRAMING]
        callbacks = SimpleNamespace(on_body=self.on_body, on_message_complete=self._end_message)
        parser = httptools.HttpRequestParser(callbacks)
        parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", b""]))
        return parser

    def _check_head(self) -> RequestError | None:
        """Return an error if the request's headers are not accepted, otherwise None."""
        message = self._message
        if message.lines > HEAD_LINES:
            return HeadTooLarge(f"the request has more than {HEAD_LINES} headers")
        if why := self._malformed():
            return InvalidRequest(why, code="invalid_http")
        if not self._within_limits and self._path() not in self._open_paths:
            return Overloaded(
                f"too many connections: the limit is {self._limiter.limit}, and "
                f"{self._limiter.limit_per_address} per address, and all are in use (--tune "
                "max_connections, max_connections_per_address); try again"
            )
        return None

    def _malformed(self) -> str:
        """Return why another HTTP parser could interpret the headers differently, or "" if none
        could.
        """
        version = self.parser.get_http_version()
        hosts = sum(name == b"host" for name, _ in self.headers)
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            return f"unsupported version HTTP/{version}: send HTTP/1.1"
        if hosts > 1:
            return "the request has several Host headers"
        if not hosts and version == "1.1":
            return "the request has no Host header, which HTTP/1.1 requires"
        if codings and [value.lower() for value in codings] != [b"chunked"]:
            return "Transfer-Encoding must be 'chunked': use that or Content-Length"
        return ""

    def _path(self) -> bytes:
        return self.url.partition(b"?")[0]

    def on_body(self, body: bytes) -> None:
        message = self._message
        message.given = 0
        if message.left is None:
            message.chunks += 1
            message.content += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        # If an upgrade is offered, this parser stops after the head.
        if self._message.refused is None and not self.parser.should_upgrade():
            self._end_message()

    def _end_message(self) -> None:
        self._message.ended = True
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._message.keep_alive and not self._stopping
        super().on_message_complete()

    # ---- response callbacks

    def on_response_complete(self) -> None:
        if self._lingering is not None:
            self.server_state.total_requests += 1
            return
        self._limiter.idle(self)
        super().on_response_complete()

    def _refuse(self, error: RequestError) -> None:
        """Send a response for `error` instead of calling the application, and close the
        connection.
        """
        if self._message.in_body:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.drop("body")
                return
        asked = Headers(raw=[*(self.headers or ())])
        name = name_of(asked)
        status, headers, body = refusal(self._path().decode("latin-1"), error, name)
        lines = [
            STATUS_LINE[status].rstrip(),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            *(f"{name}: {value}".encode() for name, value in headers.items()),
            *self._stamp.lines(name, asked),
        ]
        self._outlet.write(b"\r\n".join([*lines, b"", body]))
        self._message.ended = False
        self._finish()

    def _finish(self) -> None:
        """Close the connection after the response has been sent.

        A client that is still sending could lose the response, so the rest of its request is read
        and discarded, within limits.
        """
        if self.transport.is_closing() or self._lingering is not None:
            return
        if self._message.ended and not self._surplus:
            self.transport.close()
            return
        self._drop_surplus()
        self._unset_keepalive_if_required()
        self._lingering = 2 * self._largest
        self._deadline = self.loop.time() + LINGER_SECONDS
        self._limiter.idle(self)
        self.transport.write_eof()
        self.flow.open()  # type: ignore[attr-defined]

    # ---- timeouts

    def check(self, now: float) -> None:
        """Close the connection if a timeout has expired. Called once a second."""
        if self._outlet.stalled(now) > self._options.write_timeout:
            self.drop("unread")
        elif self._deadline is not None and now > self._deadline:
            if self._lingering is not None:
                self.drop("body")
                return
            self._limiter.closed("head")
            if self._message.given or self._surplus:
                self._refuse(
                    TooSlow(
                        "the request's headers did not arrive within "
                        f"{self._options.header_timeout:g} seconds"
                    )
                )
            else:
                self.transport.abort()

    def drop(self, reason: str) -> None:
        """Close the connection immediately, and notify the application. reason: a label of the
        metric that counts closed connections.
        """
        self._limiter.closed(reason)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._lingering = 0
        self.flow.resume_writing()
        self.transport.abort()

    # ---- buffered bytes

    def _count_surplus(self) -> bool:
        more = len(self._surplus) - self._counted
        if not self._limiter.hold_surplus(more):
            return False
        self._counted += more
        return True

    def _drop_surplus(self) -> None:
        self._surplus.clear()
        self._count_surplus()


def connections(
    crowd: ConnectionLimiter,
    options: ConnectionOptions,
    largest: int,
    open_paths: frozenset[bytes],
    stamp: Stamp,
) -> Callable[..., asyncio.Protocol]:
    """Return a factory of connections, which is uvicorn's `http` setting. The arguments are those
    of `Connection`.
    """
    return partial(Connection, crowd, options, largest, open_paths, stamp)
