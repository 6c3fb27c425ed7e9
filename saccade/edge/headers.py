"""The headers of requests and responses: request ids, API keys, clients, Host and Origin.

`client_of` identifies the client of a request. `auth.py` identifies those with a key.

If a server has no key, `Guard` rejects the requests of all web pages except its own and those of
--cors-origins. A server on a loopback address cannot be reached from other machines, but the local
browser can reach it, and web pages may send requests to any address. The request of another page is
recognized by its `Origin` or `Sec-Fetch-Site`. A page whose own host name resolves to this machine
(DNS rebinding) is recognized by its `Host`. Browsers set these headers themselves. Other clients do
not send `Origin` and `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from collections.abc import Sequence
from contextvars import ContextVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.core.client import Client, client_address
from saccade.core.errors import Forbidden, RequestError, Unauthorized
from saccade.edge.refusal import refusal

_DEFAULT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

CLIENT = "saccade.client"
"""Key in an ASGI scope for the authenticated `Client`."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request being served, for log entries."""


INSTANCE_HEADER = "x-saccade-instance"
"""Header of `/health` that identifies the server process, whose memory is lost on a restart."""
SUFFIX_HEADER = "x-saccade-file-suffix"
"""Header from a router that sets the suffix of an upload's id, for files that are on several
servers.
"""
NAME_HEADERS = ("x-request-id", "request-id")
"""Response headers with the request's id. The second is Anthropic's."""


def name_of(headers: Headers) -> str:
    """Return the id that the request carries if it is short and plain, or else a new id."""
    given = headers.get("x-request-id", "")
    return given if _DEFAULT_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


class Stamp:
    """Adds headers to responses that are sent before the application is called.

    They are the headers that the application would add: the request's id, and CORS headers for
    `origins`.
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._cors = CORSMiddleware(_nothing, origins) if origins else None

    def lines(self, name: str, asked: Headers) -> list[bytes]:
        """Return header lines for a response.

        `asked` has the request's headers, which may be incomplete.
        """
        answer = MutableHeaders(dict.fromkeys(NAME_HEADERS, name))
        answer.update(self.origin(asked))
        return [name + b": " + value for name, value in answer.raw]

    def origin(self, asked: Headers) -> MutableHeaders:
        """Return the CORS headers for the page that sent the request."""
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
    """An ASGI application that does nothing."""


class RequestIds:
    """Middleware that adds the request's id to every response."""

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
    """Return the API key from the headers of the request, or b"" if it has none."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return bytes(token.strip())
    return bytes(headers.get(b"x-api-key") or headers.get(b"api-key", b""))


def client_of(scope: Scope) -> Client:
    """Return the client that sent the request. Without API keys, it has only an address."""
    found = scope.get(CLIENT)
    return found if isinstance(found, Client) else Client(address=address_of_client(scope))


def check_operator(scope: Scope) -> None:
    """Raise Unauthorized for one of several API keys.

    All keys share the caches and weights, so only the key of --api-key may change them.
    """
    client = client_of(scope)
    if client.limited and client.name:
        raise Unauthorized(
            "caches and adapters are shared: only the key of --api-key may change them"
        )


def address_of_client(scope: Scope) -> str:
    """Return the client address of the connection."""
    return client_address((scope.get("client") or ("",))[0])


FORWARDED_HOST = "x-forwarded-host"
"""Header with the Host that a router or proxy received. Browsers do not let a page send this header
to another origin without that origin's permission. A page that sends it therefore has the server's
own origin, which the check of `Host` has accepted.
"""
_SHOWN = 200


def is_loopback(host: str) -> bool:
    """Return True if `host` resolves only to loopback addresses."""
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, None)} if host else set()
    except (OSError, UnicodeError):
        return False  # listening on it will also fail, with a specific error
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)


class Guard:
    """Middleware that rejects requests from web pages of other origins.

    `names` are host names of the server in addition to localhost and loopback addresses. `origins`
    are allowed pages, or "*" for any.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str] = (), origins: Sequence[str] = ()):
        self._app = app
        self._names = frozenset(name.lower() for name in names)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        error = self._host(headers) or self._origin(scope, headers)
        if error is None:
            await self._app(scope, receive, send)
            return
        status, extra, body = refusal(scope["path"], error, request_id.get())
        await Response(body, status, extra, "application/json")(scope, receive, send)

    def _host(self, headers: Headers) -> RequestError | None:
        given = headers.get("host")
        if given is None or self._is_ours(given):  # no browser sends HTTP/1.0
            return None
        return Forbidden(
            f"Host is {given[:_SHOWN]!r}: without a key, a server on a loopback address accepts "
            "only localhost and loopback addresses, so that web pages cannot use it: start it with "
            "--allowed-hosts NAME or with --api-key"
        )

    def _is_ours(self, authority: str) -> bool:
        try:
            name = (urlsplit(f"//{authority}").hostname or "").lower()
        except ValueError:
            return False
        if name == "localhost" or name in self._names:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def _origin(self, scope: Scope, headers: Headers) -> RequestError | None:
        """Return the error for a page of another origin, or None.

        Before a page can send a key, its browser sends an OPTIONS request, which is always
        rejected.
        """
        if scope["method"] == "OPTIONS" or given_key(scope):
            return None
        given, site = headers.get("origin"), headers.get("sec-fetch-site", "")
        if given is not None:
            if {given, "*"} & self._origins or self._is_same(given, site, headers):
                return None
            shown = repr(given[:_SHOWN])
        elif site != "cross-site" or _is_link(scope["method"], headers):
            return None
        else:
            shown = "another site's"
        return Forbidden(
            f"the request comes from a web page, whose origin is {shown}: without a key, this "
            "server only accepts requests from its own web UI: start it with --cors-origins ORIGIN "
            "to allow others"
        )

    def _is_same(self, origin: str, site: str, headers: Headers) -> bool:
        if site:
            return site == "same-origin"
        asked = {headers.get("host"), headers.get(FORWARDED_HOST)} - {None}
        return origin.partition("://")[2] in asked


def _is_link(method: str, headers: Headers) -> bool:
    """Return True if a user followed a link. Such a request only reads, and no page gets the
    response.
    """
    return (
        method in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
