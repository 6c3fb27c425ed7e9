"""Server-sent events: an answer as it is generated.

Owns the wire format of a stream and what becomes of an error in the middle of one. The response starts with the first event,
so that whatever goes wrong before it is still an HTTP status of its own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET
from starlette.types import Send

from saccade.core.errors import InternalError, RequestError
from saccade.server.front import Event
from saccade.server.responses import ErrorResponse, Tally, Writer

log = logging.getLogger("saccade")

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_encode = msgspec.json.Encoder().encode


async def stream(send: Send, events: AsyncIterator[Event], writer: Writer, tally: Tally, include_usage: bool) -> None:
    """Send `events` as chunks. Raises the RequestError that comes before the first event; a later one is sent as an error event."""
    first = await anext(events)
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    try:
        await _send_chunks(send, first, events, writer, tally, include_usage)
        last = b"data: [DONE]\n\n"
    except RequestError as error:
        last = _sse(ErrorResponse.of(error))
    except Exception:
        log.exception("an answer failed while it was being streamed")
        last = _sse(ErrorResponse.of(InternalError()))
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_chunks(send: Send, first: Event, events: AsyncIterator[Event], writer: Writer, tally: Tally, include_usage: bool) -> None:
    usage = None if include_usage else UNSET
    opened: set[int] = set()
    event: Event | None = first
    while event is not None:
        tally.add(event)
        body = b""
        if event.choice not in opened:
            opened.add(event.choice)
            opening = writer.shape.opening(event.choice)
            body = _sse(writer.chunk([opening], usage)) if opening else b""
        if event.text or event.logprobs or event.finish:
            body += _sse(writer.chunk([writer.shape.chunk(event)], usage))
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        event = await anext(events, None)
    if include_usage:
        await send({"type": "http.response.body", "body": _sse(writer.chunk([], tally.usage)), "more_body": True})


def _sse(message: object) -> bytes:
    return b"data: " + _encode(message) + b"\n\n"
