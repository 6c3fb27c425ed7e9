"""The trace of one request: its times, from the head's arrival to the answer's last byte, and its
outcome.

Owns the timeline of the request being served, and the list of traced paths. A timeline's content is
plain and small: it holds neither text nor images, nor references to them. Knows nothing of
OpenTelemetry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.api.chat.write import Usage, UsageCounter
from saccade.api.trace.image_trace import Leg, Tracer
from saccade.core.errors import RequestError
from saccade.edge.headers import request_id
from saccade.front.answer_update import Level
from saccade.front.prepared import PreparedRequest

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""Paths whose requests have journeys, and what OpenTelemetry calls what they do."""
MOST_STATE = 512
"""Characters of `tracestate` that are passed on, as the W3C asks of everybody."""


class RequestTimeline:
    """One request. Times are `time.monotonic()`. Add `wall` to get seconds since the epoch.

    status: the response's; None before. whole: its last byte was sent. failed: its final error's
    code, if any.
    """

    def __init__(self, path: str, headers: Headers) -> None:
        self.path = path
        self.request_id = request_id.get()
        self.parent = headers.get("traceparent", "")[:MOST_STATE]
        state = headers.get("tracestate", "")
        self.state = state if len(state) <= MOST_STATE else ""
        self.begun = self.ended = time.monotonic()
        self.wall = time.time() - self.begun
        self.status: int | None = None
        self.answering: float | None = None
        self.whole = False
        self.failed = ""
        self.model = ""
        self.streamed = False
        self.answer: AnswerTold | None = None

    def send(self, message: Message) -> None:
        """Record that a response part is about to be sent."""
        if message["type"] == "http.response.start":
            self.status, self.answering = message["status"], time.monotonic()

    def sent(self, message: Message) -> None:
        """Record that a response part was sent."""
        if message["type"] == "http.response.body":
            self.whole = not message.get("more_body", False)


@dataclass(frozen=True, slots=True)
class AnswerTold:
    """How a request's answers ended. limits: the request's sampling, in the conventions' words.
    finishes: the reason for each end, in the order of ends. levels: number of images found at each
    level.
    """

    arrival: float
    first: float | None
    limits: Mapping[str, int | float]
    count: int
    usage: Usage
    finishes: tuple[str, ...]
    images: int
    levels: Mapping[Level, int]
    legs: tuple[Leg, ...]

    @classmethod
    def of(
        cls, prepared: Sequence[PreparedRequest], tally: UsageCounter, tracer: Tracer
    ) -> AnswerTold:
        sampling = prepared[0].request.sampling
        limits = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
        }
        return cls(
            tracer.arrival,
            tracer.first,
            limits,
            sum(each.n for each in prepared),
            tally.usage,
            tuple(tracer.finishes),
            len(prepared[0].opened),
            tracer.levels,
            tuple(tracer.legs()),
        )


journey: ContextVar[RequestTimeline | None] = ContextVar("journey", default=None)
"""That of the request that is being served; None where nobody wants to know."""


def note_failure(error: RequestError) -> None:
    """Record that the request being served ends with `error`."""
    if (own := journey.get()) is not None:
        own.failed = error.code or error.type


class Journeys:
    """Gives `record` the timeline of every ended request to a path of `OPERATIONS`."""

    def __init__(self, app: ASGIApp, record: Callable[[RequestTimeline], None]) -> None:
        self._app = app
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or scope["path"] not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        own = RequestTimeline(scope["path"], Headers(scope=scope))
        journey.set(own)

        async def send_noted(message: Message) -> None:
            own.send(message)
            await send(message)
            own.sent(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            own.ended = time.monotonic()
            self._record(own)
