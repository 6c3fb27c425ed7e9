"""Decides which web pages may use a router and read its responses (CORS).

CORS headers are added to the router's own responses. Responses of servers already have these
headers, and are not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.edge.headers import Guard, RequestIds, Stamp, is_loopback
from saccade.plugins.route.options import RelayOptions

_ALLOWED = "access-control-allow-origin"


def guarded(router: ASGIApp, host: str, options: RelayOptions) -> ASGIApp:
    """Wrap the application of a router that listens on `host`.

    On a loopback address, requests from web pages of other origins are rejected. On a server, this
    depends on whether it has an API key. The router does not know the keys of servers, so it always
    rejects these requests.
    """
    app: ASGIApp = Origins(router, options.cors_origins)
    if is_loopback(host):
        app = Guard(app, options.allowed_hosts, options.cors_origins)
    return RequestIds(app)


class Origins:
    """Middleware that adds CORS headers, with which pages of `origins` can read responses."""

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
