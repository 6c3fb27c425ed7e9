"""Sends responses to a client: a server's responses as a stream, and errors of the router or proxy
itself.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Message, Send

from saccade.core.errors import InternalError, RequestError
from saccade.edge.headers import request_id
from saccade.edge.refusal import failure_event, refusal
from saccade.edge.upstream import Head, Headers, WorkerDisconnected
from saccade.plugins.route.events import Events
from saccade.plugins.route.heads import answer_headers

log = logging.getLogger("saccade")

BODILESS = (204, 304)


@asynccontextmanager
async def refusals(path: str, send: Send) -> AsyncIterator[Send]:
    """Convert exceptions in the context to error responses. Yields the `send` function to use in
    the context.

    An unexpected exception is logged, and gets an error response if the response has not started.
    """
    started = False

    async def note(message: Message) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        yield note
    except ClientDisconnect:
        log.debug("client disconnected before the response")
    except RequestError as error:
        await refuse(path, note, error)
    except Exception:
        log.exception("%s: a request failed", request_id.get())
        if not started:
            await refuse(path, note, InternalError())


async def pass_on(
    path: str,
    send: Send,
    answer: Head,
    content: AsyncIterator[bytes],
    broken: RequestError,
    note: Callable[[WorkerDisconnected], None],
) -> None:
    """Stream a server's response to the client.

    note: called if the server disconnects.
    broken: the error with which a stream of events then ends. Any other response ends by closing
    the connection.
    """
    headers = answer_headers(answer)
    streams = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
    if streams or answer.status in BODILESS:
        # The length may change, because an error event may be added or a partial event removed.
        headers = [header for header in headers if header[0] != b"content-length"]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    events = Events() if streams else None
    try:
        async for piece in content:
            if events is not None:
                piece = events.feed(piece)
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    except WorkerDisconnected as gone:
        note(gone)
        if events is None:
            raise ClientDisconnect from None  # closes the connection before the announced length
        rest = events.broken(failure_event(path, broken, request_id.get()))
    else:
        rest = b"" if events is None else events.flush()
    await send({"type": "http.response.body", "body": rest, "more_body": False})


async def refuse(path: str, send: Send, error: RequestError) -> None:
    """Send an error response in the format of the requested API."""
    status, headers, body = refusal(path, error, request_id.get())
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send_whole(send, status, [*raw, (b"content-type", b"application/json")], body)


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a complete response."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
