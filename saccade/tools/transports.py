"""Transports for httpx, and for httpx2 (which newer SDKs use), that send the bytes of each image to
a server only once: `httpx2.Client(transport=SendOnce(httpx2.HTTPTransport()))`.

    SendOnce        for `Client`
    AsyncSendOnce   for `AsyncClient`

`send_once.py` generates the requests. Servers are distinguished by their URL before /v1. This
module imports neither library. It uses the classes of the objects that it is passed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Self

from blake3 import blake3

from saccade.tools.send_once import (
    MAX_REFUSAL,
    Attempt,
    AttemptReply,
    Flow,
    Savings,
    ServerConversation,
    VersionQuestion,
    plain_json,
)

MAX_SERVERS = 64
_KEYS = ("authorization", "x-api-key", "api-key")
_REFUSALS = (400, 415)


class _Conversations:
    """Creates and stores a `ServerConversation` for each server. `savings` counts over all
    servers.
    """

    def __init__(self) -> None:
        self.savings = Savings()
        self._servers: OrderedDict[str, ServerConversation] = OrderedDict()

    def begin(self, request: Any) -> Flow | None:
        """Return the flow for a request's body, or `None` if the request must be sent unchanged."""
        headers = request.headers
        content = headers.get("content-type", ""), headers.get("content-encoding", "")
        if not plain_json(request.method, *content):
            return None
        server = str(_version_request(request).url)
        if (found := self._servers.pop(server, None)) is None:
            found = ServerConversation(self.savings)
        self._servers[server] = found
        while len(self._servers) > MAX_SERVERS:
            self._servers.popitem(last=False)
        keys = "\n".join(headers.get(name, "") for name in _KEYS)
        return found.flow(request.content, blake3(keys.encode()).hexdigest())


class _Transport:
    """Base class of both transports. transport: sends the requests."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._conversations = _Conversations()

    @property
    def savings(self) -> Savings:
        """The bytes and images that were not sent again so far."""
        return self._conversations.savings


class SendOnce(_Transport):
    """Sends the bytes of each image once, to servers that support it.

    transport: sends the requests, for example an `HTTPTransport`.
    """

    def handle_request(self, request: Any) -> Any:
        """Send a request and return the response. Images that the server has are replaced by their
        digests.
        """
        request.read()
        flow = self._conversations.begin(request)
        if flow is None:
            return self._transport.handle_request(request)
        step = next(flow)
        while True:
            answer = self._transport.handle_request(_request(request, step))
            told = answer.read() if _is_read(step, answer.status_code) else b""
            try:
                step = flow.send(AttemptReply(answer.status_code, told[:MAX_REFUSAL]))
            except StopIteration:
                return answer
            answer.close()

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        self._transport.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._transport.__exit__(*error)


class AsyncSendOnce(_Transport):
    """Sends the bytes of each image once, to servers that support it.

    transport: sends the requests, for example an `AsyncHTTPTransport`.
    """

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request and return the response. Images that the server has are replaced by their
        digests.
        """
        await request.aread()
        flow = self._conversations.begin(request)
        if flow is None:
            return await self._transport.handle_async_request(request)
        step = next(flow)
        while True:
            answer = await self._transport.handle_async_request(_request(request, step))
            told = await answer.aread() if _is_read(step, answer.status_code) else b""
            try:
                step = flow.send(AttemptReply(answer.status_code, told[:MAX_REFUSAL]))
            except StopIteration:
                return answer
            await answer.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._transport.__aexit__(*error)


def _request(request: Any, step: Attempt | VersionQuestion) -> Any:
    if isinstance(step, VersionQuestion):
        return _version_request(request)
    if step.content_type is None:
        return request
    headers = request.headers.copy()
    headers["content-type"] = step.content_type
    headers["content-length"] = str(len(step.body))
    return type(request)(
        request.method,
        request.url,
        headers=headers,
        content=bytes(step.body),
        extensions=request.extensions,
    )


def _version_request(request: Any) -> Any:
    path = request.url.path
    before = path[: max(0, path.rfind("/v1/"))]
    url = request.url.copy_with(path=f"{before}/version", query=None)
    keys = {name: request.headers[name] for name in _KEYS if name in request.headers}
    return type(request)("GET", url, headers=keys, extensions=request.extensions)


def _is_read(step: Attempt | VersionQuestion, status: int) -> bool:
    """Return True if the flow needs the body of a response with this status."""
    if isinstance(step, VersionQuestion):
        return True
    return step.content_type is not None and status in _REFUSALS
