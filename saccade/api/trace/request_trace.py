"""The timelines of requests to traced paths, given to recorders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.api.trace.timeline import RequestTimeline, journey

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""Paths whose requests have journeys, and what OpenTelemetry calls what they do."""


class TimelineRecorder(Protocol):
    """Takes the timelines of ended requests, such as to send them elsewhere."""

    def record(self, journey: RequestTimeline) -> None:
        """Take a timeline, without waiting: this is the event loop."""

    def close(self) -> None:
        """Finish what was taken, in any thread, once."""


class Journeys:
    """Gives recorders the timeline of every ended request to a path of `OPERATIONS`."""

    def __init__(self, app: ASGIApp, recorders: Sequence[TimelineRecorder]) -> None:
        self._app = app
        self._recorders = recorders

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
            for recorder in self._recorders:
                recorder.record(own)
