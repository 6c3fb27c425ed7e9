"""The timeline of the request that is being served, from the arrival of its headers to the last
byte of the response.

A timeline is small, and contains neither texts nor images.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Message

from saccade.core.errors import RequestError
from saccade.edge.headers import request_id

if TYPE_CHECKING:
    from saccade.api.trace.tracer import AnswerSummary

MAX_STATE = 512
"""Maximum number of characters of `tracestate` that are passed on, as the W3C recommends."""


class RequestTimeline:
    """When the stages of one request happened, in `time.monotonic()` seconds. Add `wall` to get
    seconds since the epoch.
    """

    def __init__(self, path: str, headers: Headers) -> None:
        self.path = path
        self.request_id = request_id.get()
        self.parent = headers.get("traceparent", "")[:MAX_STATE]
        state = headers.get("tracestate", "")
        self.state = state if len(state) <= MAX_STATE else ""
        self.begun = self.ended = time.monotonic()
        self.wall = time.time() - self.begun
        self.status: int | None = None  # of the response, once it has started
        self.answering: float | None = None
        self.whole = False  # the last byte was sent
        self.failed = ""  # code of the error, if any
        self.model = ""
        self.streamed = False
        self.answer: AnswerSummary | None = None

    def send(self, message: Message) -> None:
        """Record that a message of the response is about to be sent."""
        if message["type"] == "http.response.start":
            self.status, self.answering = message["status"], time.monotonic()

    def sent(self, message: Message) -> None:
        """Record that a message of the response has been sent."""
        if message["type"] == "http.response.body":
            self.whole = not message.get("more_body", False)


journey: ContextVar[RequestTimeline | None] = ContextVar("journey", default=None)
"""The timeline of the request that the current task serves, or None if it is not recorded."""


def note_failure(error: RequestError) -> None:
    """Record in the current timeline, if any, that the request fails with `error`."""
    if (own := journey.get()) is not None:
        own.failed = error.code or error.type
