"""The proxy's ASGI application. It replaces bytes in request bodies with their digests if the
server already has the bytes, and returns responses unchanged.

`tools/send_once.py` generates the requests. The proxy does not validate requests, since the server
does. Bodies are processed on threads, and everything else on one event loop.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from blake3 import blake3
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from saccade.core.client import Permits
from saccade.core.config import MIB
from saccade.core.errors import ConfigError, ReplicaLost
from saccade.core.shown_url import shown_url
from saccade.edge.body import Admission, Bodies, BufferedBody, read_whole, while_connected
from saccade.edge.headers import given_key, request_id
from saccade.edge.upstream import Upstream, WorkerDisconnected
from saccade.plugins.proxy.options import ProxyOptions
from saccade.plugins.route.heads import request_head
from saccade.plugins.route.relay import pass_on, refusals
from saccade.tools.send_once import (
    LEAST,
    MAX_REFUSAL,
    Attempt,
    AttemptReply,
    Flow,
    ServerConversation,
    VersionQuestion,
    plain_json,
)

log = logging.getLogger("saccade")

CONNECT_SECONDS = 20.0
_KEYS = (b"authorization", b"x-api-key", b"api-key")
_WRITTEN_ANEW = (b"host", b"accept-encoding")
"""Request headers that the proxy sets itself. The client's Host names the proxy, and a compressed
stream could not be forwarded event by event.
"""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of the upstream server."""

    name: str  # URL without /v1
    host: str
    port: int
    prefix: str  # of paths, before /v1
    secure: bool  # whether to use TLS

    @classmethod
    def read(cls, url: str) -> ServerAddress:
        """Read a URL, with or without /v1. Raises ConfigError."""
        shown = shown_url(url)
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, given = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"--upstream {shown!r}: {error}") from None
        secure = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise ConfigError(f"--upstream {shown!r}: write http://HOST:PORT or https://HOST")
        if parts.query or parts.fragment:
            raise ConfigError(f"--upstream {shown!r}: remove the query and fragment")
        path = parts.path.rstrip("/").removesuffix("/v1")
        port = given or (443 if secure else 80)
        return cls(f"{parts.scheme}://{parts.netloc}{path}", host, port, path, secure)

    @property
    def authority(self) -> bytes:
        return urlsplit(self.name).netloc.encode()

    def connect(self) -> Upstream:
        """Create the connection pool to the server."""
        tls = ssl.create_default_context() if self.secure else None
        return Upstream(self.host, self.port, tls, CONNECT_SECONDS)


class NamingProxy:
    """The ASGI application, which replaces bytes in requests with their digests."""

    def __init__(self, address: ServerAddress, options: ProxyOptions, bodies: Bodies) -> None:
        self.sender = ServerConversation()
        self.requests = 0
        self._address = address
        self._upstream = address.connect()
        permits = Permits(options.max_requests, "--max-requests")
        self._admission = Admission(permits, bodies, options.max_body_mb * MIB, lambda: None)
        self._threads = bodies.threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with (
            refusals(scope["path"], send) as answer,
            self._admission.admit(scope, receive, read_whole) as (body, held),
        ):
            self.requests += 1
            await while_connected(receive, self._relay(scope, answer, body, held))

    def close(self) -> None:
        self._upstream.drop()
        self._threads.close()

    async def _relay(self, scope: Scope, send: Send, body: bytearray, held: BufferedBody) -> None:
        """Send the requests that `flow` generates until one of them gets the response for the
        client. Raises ReplicaLost.
        """
        flow = self._flow(scope, body)
        held.resize(2 * len(body))  # the budget also counts the body that replaces it
        try:
            step = await self._advance(flow, None, len(body))
            while step is not None:
                if isinstance(step, VersionQuestion):
                    step = await self._advance(flow, await self._probe(scope), len(body))
                else:
                    step = await self._send(scope, send, flow, step, (body, held))
        except WorkerDisconnected as gone:
            raise ReplicaLost(
                f"{self._address.name} does not respond: {gone}: send the request again",
                code="upstream_lost",
            ) from None

    def _flow(self, scope: Scope, body: bytearray) -> Flow:
        headers = Headers(scope=scope)
        content = headers.get("content-type", ""), headers.get("content-encoding", "")
        if len(body) >= LEAST and plain_json(scope["method"], *content):
            sender = blake3(given_key(scope)).hexdigest()
            return self.sender.flow(body, sender)
        return self.sender.unchanged(body)

    async def _advance(
        self, flow: Flow, reply: AttemptReply | None, nbytes: int
    ) -> Attempt | VersionQuestion | None:
        """Return the next message that `flow` wants to send, or `None` at its end.

        nbytes: the size of the body. If it is large, the flow runs on a thread.
        """
        return await self._threads.run(nbytes, partial(_step, flow, reply))

    async def _send(
        self,
        scope: Scope,
        send: Send,
        flow: Flow,
        attempt: Attempt,
        asked: tuple[bytearray, BufferedBody],
    ) -> Attempt | VersionQuestion | None:
        head = self._head(scope, attempt)
        exchange = self._upstream.exchange(scope["method"].encode(), head, attempt.body)
        async with exchange as (answer, content):
            told = b""
            if attempt.content_type is not None and answer.status in (400, 415):
                told = await _beginning(content)
            reply = AttemptReply(answer.status, told)
            step = await self._advance(flow, reply, len(attempt.body))
            if step is None:
                _drop(attempt.body, *asked)
                answered = _joined(told, content)
                await pass_on(scope["path"], send, answer, answered, _BROKEN, _note)
            return step

    async def _probe(self, scope: Scope) -> AttemptReply:
        """Request /version from the server, with the client's API key, and return the response."""
        headers = [(name, value) for name, value in scope["headers"] if name in _KEYS]
        asking = {
            "method": "GET",
            "raw_path": f"{self._address.prefix}/version".encode(),
            "query_string": b"",
            "headers": headers,
        }
        head = request_head(asking, self._address.authority, 0)
        async with self._upstream.exchange(b"GET", head) as (answer, content):
            return AttemptReply(answer.status, await _beginning(content))

    def _head(self, scope: Scope, attempt: Attempt) -> bytes:
        headers = [each for each in scope["headers"] if each[0] not in _WRITTEN_ANEW]
        if attempt.content_type is not None:
            headers = [each for each in headers if each[0] != b"content-type"]
            headers.append((b"content-type", attempt.content_type.encode()))
        headers.append((b"accept-encoding", b"identity"))
        target = self._address.prefix.encode() + scope["raw_path"]
        changed = {**scope, "raw_path": target, "headers": headers}
        return request_head(changed, self._address.authority, len(attempt.body))


def _drop(sent: bytes | bytearray, body: bytearray, held: BufferedBody) -> None:
    """Release the memory of a request once its response starts, because streaming the response may
    take long.
    """
    with suppress(BufferError):  # some of it is still being sent
        body.clear()
        if isinstance(sent, bytearray):
            sent.clear()
        held.resize(0)


def _step(flow: Flow, reply: AttemptReply | None) -> Attempt | VersionQuestion | None:
    try:
        return next(flow) if reply is None else flow.send(reply)
    except StopIteration:
        return None


async def _beginning(content: AsyncIterator[bytes]) -> bytes:
    """Read a response, or only the beginning if it is long."""
    told = bytearray()
    async for piece in content:
        told += piece
        if len(told) > MAX_REFUSAL:
            break
    return bytes(told)


async def _joined(told: bytes, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if told:
        yield told
    async for piece in content:
        yield piece


def _note(gone: WorkerDisconnected) -> None:
    log.warning("%s: response cut off: %s", request_id.get(), gone)


_BROKEN = ReplicaLost(
    "the server disconnected during the response: send the request again", code="upstream_lost"
)
