"""Server-sent events: an answer as it is generated.

Owns the wire format of a stream and what becomes of an error in the middle of one. The response
starts with the first event, so that whatever goes wrong before it is still an HTTP status of its
own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Send

from saccade.core.errors import InternalError, RequestError
from saccade.front.front import Event
from saccade.server.answers import ErrorResponse, Tally, Usage, Writer
from saccade.server.trace import Tracer

log = logging.getLogger("saccade")

UsageWanted = Literal["last", "always"] | None

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


async def stream(
    send: Send,
    events: AsyncIterator[Event],
    writer: Writer,
    tally: Tally,
    tracer: Tracer,
    usage: UsageWanted,
) -> None:
    """Send `events` as chunks. `usage`: whether the last chunk says it, or every one.

    Raises the RequestError that comes before the first event; a later one is sent as an error
    event.
    """
    first = await anext(events)
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    try:
        opened = set[int]()
        event: Event | None = first
        while event is not None:
            tally.add(event)
            tracer.add(event)
            used = tally.usage if usage == "always" else None if usage == "last" else UNSET
            if body := _chunks(event, writer, opened, used):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            event = await anext(events, None)
        if usage or tracer.wanted:
            end = writer.chunk(
                [],
                tally.usage if usage else UNSET,
                tracer.trace if tracer.wanted else UNSET,
            )
            await send({"type": "http.response.body", "body": _sse(end), "more_body": True})
        last = b"data: [DONE]\n\n"
    except RequestError as error:
        last = _sse(ErrorResponse.of(error))
    except Exception:
        log.exception("an answer failed while it was being streamed")
        last = _sse(ErrorResponse.of(InternalError()))
    await send({"type": "http.response.body", "body": last, "more_body": False})


def _chunks(
    event: Event, writer: Writer, opened: set[int], usage: Usage | UnsetType | None
) -> bytes:
    """What a stream shows of an event: before a choice's first, its opening."""
    body = b""
    if event.choice not in opened:
        opened.add(event.choice)
        opening = writer.shape.opening(event.choice)
        body = _sse(writer.chunk([opening], usage)) if opening else b""
    return body + b"".join(_sse(writer.chunk([part], usage)) for part in writer.shape.chunks(event))


def _sse(message: object) -> bytes:
    return b"data: " + _encode(message) + b"\n\n"
