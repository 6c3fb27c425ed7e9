"""What a request says of itself in its headers: its id, and its key.

Knows nothing of routes, and not which keys are right.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_USUAL_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that is being served, for the log."""


class RequestIds:
    """Gives every answer the header x-request-id, and request-id, by which Anthropic's clients know
    it: the request's own, where that is short and plain, else a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _USUAL_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        request_id.set(name)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = name
            await send(message)

        await self._app(scope, receive, send_named)


def given_key(scope: Scope) -> bytes:
    """The key that a request carries, in one of the two usual headers; empty if none."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return bytes(token.strip())
    return bytes(headers.get(b"x-api-key", b""))
