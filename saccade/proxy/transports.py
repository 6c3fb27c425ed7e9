"""Transports for httpx that send bytes once: `httpx.Client(transport=SendOnce())`.

    SendOnce        for `httpx.Client`
    AsyncSendOnce   for `httpx.AsyncClient`

What to send is `send_once.py`'s. Each server, by its URL before /v1, has a conversation of its own.
"""

from __future__ import annotations

from collections import OrderedDict

import httpx
from blake3 import blake3

from saccade.proxy.send_once import (
    LONGEST_REFUSAL,
    Attempt,
    AttemptReply,
    Flow,
    Savings,
    ServerConversation,
    VersionQuestion,
    plain_json,
)

MOST_SERVERS = 64
_KEYS = ("authorization", "x-api-key", "api-key")
_REFUSALS = (400, 415)


class _Conversations:
    """What is known of each server. savings: of all."""

    def __init__(self) -> None:
        self.savings = Savings()
        self._servers: OrderedDict[str, ServerConversation] = OrderedDict()

    def begin(self, request: httpx.Request) -> Flow | None:
        """Begin to send a request's body, or return None for one that goes as it is."""
        headers = request.headers
        content = headers.get("content-type", ""), headers.get("content-encoding", "")
        if not plain_json(request.method, *content):
            return None
        server = str(_probe(request).url)
        if (found := self._servers.pop(server, None)) is None:
            found = ServerConversation(self.savings)
        self._servers[server] = found
        while len(self._servers) > MOST_SERVERS:
            self._servers.popitem(last=False)
        keys = "\n".join(headers.get(name, "") for name in _KEYS)
        return found.flow(request.content, blake3(keys.encode()).hexdigest())


class SendOnce(httpx.BaseTransport):
    """Sends each image's bytes once to a server that takes names. `transport` sends requests."""

    def __init__(self, transport: httpx.BaseTransport | None = None) -> None:
        self._transport = transport or httpx.HTTPTransport()
        self._conversations = _Conversations()

    @property
    def savings(self) -> Savings:
        """Return what was saved so far."""
        return self._conversations.savings

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        flow = self._conversations.begin(request)
        if flow is None:
            return self._transport.handle_request(request)
        step = next(flow)
        while True:
            answer = self._transport.handle_request(_request(request, step))
            reply = AttemptReply(answer.status_code)
            if _is_read(step, answer):
                reply = AttemptReply(answer.status_code, _short(answer.read()))
            try:
                step = flow.send(reply)
            except StopIteration:
                return answer
            answer.close()

    def close(self) -> None:
        self._transport.close()


class AsyncSendOnce(httpx.AsyncBaseTransport):
    """Sends each image's bytes once to a server that takes names. `transport` sends requests."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._transport = transport or httpx.AsyncHTTPTransport()
        self._conversations = _Conversations()

    @property
    def savings(self) -> Savings:
        """Return what was saved so far."""
        return self._conversations.savings

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        flow = self._conversations.begin(request)
        if flow is None:
            return await self._transport.handle_async_request(request)
        step = next(flow)
        while True:
            answer = await self._transport.handle_async_request(_request(request, step))
            reply = AttemptReply(answer.status_code)
            if _is_read(step, answer):
                reply = AttemptReply(answer.status_code, _short(await answer.aread()))
            try:
                step = flow.send(reply)
            except StopIteration:
                return answer
            await answer.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()


def _request(request: httpx.Request, step: Attempt | VersionQuestion) -> httpx.Request:
    """Return the request for a step of the flow."""
    if isinstance(step, VersionQuestion):
        return _probe(request)
    if step.content_type is None:
        return request
    headers = request.headers.copy()
    headers["content-type"] = step.content_type
    headers["content-length"] = str(len(step.body))
    body = bytes(step.body)
    return httpx.Request(
        "POST", request.url, headers=headers, content=body, extensions=request.extensions
    )


def _probe(request: httpx.Request) -> httpx.Request:
    """Return the question what the server reads."""
    path = request.url.path
    before = path[: max(0, path.rfind("/v1/"))]
    url = request.url.copy_with(raw_path=f"{before}/version".encode())
    keys = {name: request.headers[name] for name in _KEYS if name in request.headers}
    return httpx.Request("GET", url, headers=keys, extensions=request.extensions)


def _is_read(step: Attempt | VersionQuestion, answer: httpx.Response) -> bool:
    """Return True if the flow has to see an answer's content."""
    if isinstance(step, VersionQuestion):
        return True
    return step.content_type is not None and answer.status_code in _REFUSALS


def _short(content: bytes) -> bytes:
    return content if len(content) <= LONGEST_REFUSAL else b""
