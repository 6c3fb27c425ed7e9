"""Middleware that records the timeline of each request, for plugins that export them."""

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
"""Paths whose requests are recorded, with the name of the operation in OpenTelemetry."""


class TimelineRecorder(Protocol):
    """Receives the timeline of each finished request, for example to export it."""

    def record(self, journey: RequestTimeline) -> None:
        """Receive a timeline. Called on the event loop, so it must not block."""

    def close(self) -> None:
        """Finish pending work. Called once, in any thread."""


class Journeys:
    """Middleware that passes the timeline of each finished request to `recorders`, for paths in
    `OPERATIONS`.
    """

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
