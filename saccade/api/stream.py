"""Sends an answer as server-sent events while it is generated.

The response starts with the first event, so an earlier error still has its own HTTP status. A later
error is sent as an event. Each API implements `ResponseWriter`. `Choices` does so for OpenAI's chat
and text completions.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Send

from saccade.api.chat.write import (
    CacheDiagnostics,
    ChoiceReply,
    Completion,
    Usage,
    UsageCounter,
    Writer,
)
from saccade.api.trace.timeline import note_failure
from saccade.core.errors import InternalError, RequestError
from saccade.edge.refusal import ErrorResponse
from saccade.front.answer_update import AnswerUpdate
from saccade.front.prepared import PreparedRequest

if TYPE_CHECKING:  # imported by traced requests
    from saccade.api.trace.image_trace import Trace
    from saccade.api.trace.tracer import Tracer

log = logging.getLogger("saccade")

UsageWanted = Literal["last", "always"] | None

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MARK = b"\0"
"""A byte that never occurs in JSON. In a `StreamedBody`, two of them enclose the index of a run
that is encoded later.
"""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The requests that a `ResponseWriter` answers, and their counters."""

    prepared: Sequence[PreparedRequest]
    tally: UsageCounter
    tracer: Tracer | None = None

    @property
    def trace(self) -> Trace | UnsetType:
        """The trace of the request if the client requested it, otherwise UNSET."""
        return UNSET if self.tracer is None or not self.tracer.wanted else self.tracer.trace

    async def counted(self, events: AsyncIterator[AnswerUpdate]) -> AsyncIterator[AnswerUpdate]:
        """Yield `events` after adding each of them to the counters."""
        try:
            async for event in events:
                self.tally.add_update(event)
                if self.tracer is not None:
                    self.tracer.add_update(event)
                yield event
        except RequestError as error:
            note_failure(error)
            raise


class ResponseWriter(Protocol):
    """Writes the response to one request in the format of an API.

    For a stream, `shown` is called for each event, then `ending`. Otherwise `keep_update` is called
    for each event, then `whole`.
    """

    def shown(self, event: AnswerUpdate) -> bytes:
        """Return the bytes to stream for an event. They may be empty."""
        ...

    def ending(self) -> bytes:
        """Return the last bytes of the stream."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """Return the bytes that report an error in a stream that has already started."""
        ...

    def keep_update(self, event: AnswerUpdate) -> None:
        """Store an event for a response that is not streamed."""
        ...

    def whole(self) -> object:
        """Return the response body, built from all stored events."""
        ...


async def stream(send: Send, events: AsyncIterator[AnswerUpdate], teller: ResponseWriter) -> None:
    """Send `events` as they arrive.

    Raises a RequestError that occurs before the first event. A later error is sent as an event.
    """
    event: AnswerUpdate | None = await anext(events)
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    try:
        while event is not None:
            if body := teller.shown(event):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            event = await anext(events, None)
        last = teller.ending()
    except RequestError as error:
        last = teller.failure(error)
    except Exception:
        log.exception("an answer failed while it was being streamed")
        last = teller.failure(InternalError())
    await send({"type": "http.response.body", "body": last, "more_body": False})


class Choices:
    """Writes responses of OpenAI's chat and text completions.

    usage: "last" reports usage in the last chunk of a stream, "always" in every chunk, and None in
    none.
    """

    def __init__(self, writer: Writer, context: AnswerContext, usage: UsageWanted) -> None:
        self._writer = writer
        self._context = context
        self._tally = context.tally
        self._diagnoses = context.prepared[0].request.caching.diagnose
        self._usage: UsageWanted = usage
        self._opened = set[int]()
        count = sum(each.n for each in context.prepared)
        self._answers = [ChoiceReply(writer.shape, i) for i in range(count)]

    def shown(self, event: AnswerUpdate) -> bytes:
        """Return the chunks of an event. The first event of a choice also has its opening chunk."""
        writer = self._writer
        used: Usage | UnsetType | None = (
            self._tally.usage
            if self._usage == "always"
            else None
            if self._usage == "last"
            else UNSET
        )
        body = b""
        if event.choice not in self._opened:
            self._opened.add(event.choice)
            opening = writer.shape.opening(event.choice)
            body = _sse(writer.chunk([opening], used)) if opening else b""
        shape = writer.shape
        return body + b"".join(_sse(writer.chunk([part], used)) for part in shape.chunks(event))

    def ending(self) -> bytes:
        body = b""
        trace = self._context.trace
        if self._usage or trace is not UNSET or self._diagnoses:
            usage = self._tally.usage if self._usage else UNSET
            body = _sse(self._writer.chunk([], usage, trace, self._diagnostics))
        return body + b"data: [DONE]\n\n"

    def failure(self, error: RequestError) -> bytes:
        return _sse(ErrorResponse.of(error))

    def keep_update(self, event: AnswerUpdate) -> None:
        self._answers[event.choice].add_update(event)

    def whole(self) -> Completion:
        usage = self._tally.usage
        return self._writer.whole(self._answers, usage, self._context.trace, self._diagnostics)

    @property
    def _diagnostics(self) -> CacheDiagnostics | UnsetType:
        return CacheDiagnostics.of(self._tally.missed) if self._diagnoses else UNSET


def _sse(message: object) -> bytes:
    return b"data: " + _encode(message) + b"\n\n"


class StreamedBody:
    """A response body that is encoded in chunks because it is long."""

    def __init__(self, content: object, runs: Sequence[Iterator[bytes]]) -> None:
        """Encode `content`. Each marker in it (see `stands_for`) is replaced with one of `runs`
        when it is sent.
        """
        self._body = msgspec.json.encode(content)
        self._runs = runs

    def pieces(self) -> Iterator[bytes]:
        """Yield chunks of the body. Encoding a chunk takes at most a few ms."""
        for index, part in enumerate(self._body.split(MARK)):
            if index % 2:
                yield from self._runs[int(part)]
            else:
                yield part
