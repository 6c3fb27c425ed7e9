"""Answers by the router itself, made readable for the pages that the servers admit.

Owns the choice of these answers: all without headers about origins. Servers' answers pass
unchanged. Knows nothing of routes.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.edge.headers import Stamp

_ALLOWED = "access-control-allow-origin"


class Origins:
    """The application, with the headers that let a page of `origins` read its answers."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._stamp = Stamp(origins) if origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stamp = self._stamp
        if stamp is None:
            await self._app(scope, receive, send)
            return

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if _ALLOWED not in headers and "vary" not in headers:
                    headers.update(stamp.origin(Headers(scope=scope)))
            await send(message)

        await self._app(scope, receive, send_readable)
