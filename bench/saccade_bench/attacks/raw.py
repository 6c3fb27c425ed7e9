"""Raw HTTP over sockets, for requests that no well-behaved client would send."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """A complete response. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, object]:
        """OpenAI's error object."""
        return json.loads(self.body)["error"]


def connect(
    url: str, *, receive_buffer: int | None = None, timeout: float = 30, source: str = ""
) -> socket.socket:
    """Connect to the server at `url`. `source` is the local address to bind to, if not empty."""
    split = urlsplit(url)
    connection = socket.socket()
    connection.settimeout(timeout)
    if receive_buffer is not None:  # only has an effect before the connection is made
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    if source:
        connection.bind((source, 0))
    connection.connect((split.hostname, split.port))
    return connection


def head(method: str, path: str, *lines: str, host: str = "localhost", **headers: object) -> bytes:
    """Return a request line and headers, followed by an empty line.

    `lines` are written verbatim. `content_length=3` becomes `content-length: 3`.
    """
    named = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    hosts = [f"host: {host}"] if host else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", *hosts, *lines, *named, "", ""]).encode(
        "latin-1"
    )


def post(path: str, body: object, *lines: str, **headers: object) -> bytes:
    """Return a complete POST request with JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named: dict[str, Any] = {"content_type": "application/json", "content_length": len(data)}
    return head("POST", path, *lines, **named | headers) + data


class _Unhurried:
    """Reads no more than requested, so that the next response stays in the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def makefile(self, mode: str) -> object:
        return self._connection.makefile(mode, buffering=1)  # type: ignore[call-overload]


def read(connection: socket.socket, method: str = "GET") -> Answer:
    """Read one response.

    Raises ConnectionError if the server closes the connection first, and TimeoutError if there is
    no response in time.
    """
    response = HTTPResponse(_Unhurried(connection), method=method)  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except HTTPException as error:
        raise ConnectionError(str(error)) from error
    return Answer(
        response.status, {name.lower(): value for name, value in response.getheaders()}, body
    )


def ask(url: str, request: bytes, **options: object) -> Answer:
    """Send one request on a new connection, and return the response."""
    with connect(url, **options) as connection:  # type: ignore[arg-type]
        with_reset = False
        try:
            connection.sendall(request)
        except (BrokenPipeError, ConnectionResetError):
            with_reset = True  # a response may have been sent before
        try:
            return read(connection, request.split(b" ", 1)[0].decode("latin-1"))
        except ConnectionError:
            if with_reset:
                raise ConnectionResetError("the server reset the connection") from None
            raise


def is_closed(connection: socket.socket, within: float) -> bool:
    """Return True if the server closes the connection within `within` seconds, even if it sends
    data before.
    """
    deadline = time.monotonic() + within
    try:
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(65536):
                return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


@contextmanager
def connections(url: str, count: int, **options: object) -> Iterator[list[socket.socket]]:
    """Open `count` connections, which are closed on exit."""
    with ExitStack() as stack:
        yield [stack.enter_context(connect(url, **options)) for _ in range(count)]  # type: ignore[arg-type]


def flood(
    sockets: Sequence[socket.socket],
    payload: bytes,
    times: int,
    seconds: float,
    patience: float = 15,
) -> int:
    """Write `payload` up to `times` times to every socket concurrently, without reading.

    Stops when everything is written, when no byte was accepted for `patience` seconds, or after
    `seconds`. Returns the number of bytes accepted.
    """
    block = payload * max(1, 65536 // len(payload))
    total = len(payload) * times
    sent = dict.fromkeys(sockets, 0)
    deadline, last = time.monotonic() + seconds, time.monotonic()
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            each.setblocking(False)
            selector.register(each, selectors.EVENT_WRITE)
        while selector.get_map() and time.monotonic() < min(deadline, last + patience):
            for key, _ in selector.select(0.2):
                assert isinstance(key.fileobj, socket.socket)
                each = key.fileobj
                at = sent[each] % len(block)
                try:
                    sent[each] += each.send(block[at : at + total - sent[each]])
                    last = time.monotonic()
                except BlockingIOError:
                    continue
                except OSError:
                    selector.unregister(each)
                    continue
                if sent[each] >= total:
                    selector.unregister(each)
    return sum(sent.values())
