"""The headers of requests that tell id, key and origin, and the headers of every answer.

Knows nothing of routes or of right keys.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_USUAL_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that is being served, for the log."""


INSTANCE_HEADER = "x-saccade-instance"
"""Where `/health` says which run of the server it is: what is kept in memory is this run's."""
SUFFIX_HEADER = "x-saccade-file-suffix"
"""Where a router says how the id of an upload shall end, which it sends to several servers."""
NAME_HEADERS = ("x-request-id", "request-id")
"""Where an answer says which request it is of; Anthropic's clients know the second."""


def name_of(headers: Headers) -> str:
    """Return the request's own id if short and plain, else a new id."""
    given = headers.get("x-request-id", "")
    return given if _USUAL_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


class Stamp:
    """Headers for answers made before the application is asked.

    They are the application's own, with the request's id, and CORS headers for `origins`.
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._cors = CORSMiddleware(_nothing, origins) if origins else None

    def lines(self, name: str, asked: Headers) -> list[bytes]:
        """Return header lines for an answer.

        `asked`: the request's headers, complete or partial.
        """
        answer = MutableHeaders(dict.fromkeys(NAME_HEADERS, name))
        answer.update(self.origin(asked))
        return [name + b": " + value for name, value in answer.raw]

    def origin(self, asked: Headers) -> MutableHeaders:
        """Return CORS headers for the asking page."""
        answer = MutableHeaders()
        if (cors := self._cors) is not None:
            origin = asked.get("origin")
            if origin is not None:
                answer.update(cors.simple_headers)
            if origin and not cors.allow_all_origins and cors.is_allowed_origin(origin):
                cors.allow_explicit_origin(answer, origin)
            else:
                answer["vary"] = "Origin"
        return answer


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve as an empty application."""


class RequestIds:
    """Adds the request's id to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = name_of(Headers(scope=scope))
        request_id.set(name)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(dict.fromkeys(NAME_HEADERS, name))
            await send(message)

        await self._app(scope, receive, send_named)


def given_key(scope: Scope) -> bytes:
    """Return the key that a request carries, in any usual header; empty without one."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return bytes(token.strip())
    return bytes(headers.get(b"x-api-key") or headers.get(b"api-key", b""))
