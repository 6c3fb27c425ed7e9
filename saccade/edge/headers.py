"""Headers of requests and responses: request ids, API keys, clients, Host and Origin.

`client_of` returns the client of a request. If the server requires a key, `auth.py` has identified
it.

If a server requires no key, `Guard` rejects requests from all web pages except its own and those of
--cors-origins. Other machines cannot reach a server on a loopback address, but the browser on this
machine can, and web pages may send requests to any address. A request from another page is
recognized by its `Origin` or `Sec-Fetch-Site`. A page whose own host name resolves to this machine
(DNS rebinding) is recognized by its `Host`. Pages cannot change these headers. Clients other than
browsers do not send `Origin` and `Sec-Fetch-Site`.
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
"""Key in an ASGI scope under which the authenticated `Client` is stored."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the current task serves, for log entries."""


INSTANCE_HEADER = "x-saccade-instance"
"""Header of `/health` that identifies the server process. It changes on a restart, which clears the
server's memory.
"""
SUFFIX_HEADER = "x-saccade-file-suffix"
"""Header in which a router specifies the suffix of an uploaded file's id, because it sends files to
several servers.
"""
NAME_HEADERS = ("x-request-id", "request-id")
"""Response headers that contain the request's id. The second is Anthropic's."""


def name_of(headers: Headers) -> str:
    """Return the request's own id (X-Request-Id) if it is short and plain, otherwise a new id."""
    given = headers.get("x-request-id", "")
    return given if _DEFAULT_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


class Stamp:
    """Adds headers to responses that are sent without calling the application.

    They are headers that the application would add: the request's id, and CORS headers for
    `origins`.
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._cors = CORSMiddleware(_nothing, origins) if origins else None

    def lines(self, name: str, asked: Headers) -> list[bytes]:
        """Return header lines for a response.

        name: the request's id.
        asked: the request's headers, which may be incomplete.
        """
        answer = MutableHeaders(dict.fromkeys(NAME_HEADERS, name))
        answer.update(self.origin(asked))
        return [name + b": " + value for name, value in answer.raw]

    def origin(self, asked: Headers) -> MutableHeaders:
        """Return the CORS headers for the page that sent the request with the headers `asked`."""
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
    """Do nothing. A placeholder application for `CORSMiddleware`, of which only the headers are
    used.
    """


class RequestIds:
    """Middleware that adds the id of the request to every response."""

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
    """Return the API key from the request's headers, or b"" if there is none."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return bytes(token.strip())
    return bytes(headers.get(b"x-api-key") or headers.get(b"api-key", b""))


def client_of(scope: Scope) -> Client:
    """Return the client that sent the request. If the server requires no key, the client has only
    an address.
    """
    found = scope.get(CLIENT)
    return found if isinstance(found, Client) else Client(address=address_of_client(scope))


def check_operator(scope: Scope) -> None:
    """Raise Unauthorized if the client may not change caches and weights.

    All clients share the caches and weights. So if there are several API keys, only the key from
    --api-key may change them.
    """
    client = client_of(scope)
    if client.limited and client.name:
        raise Unauthorized(
            "caches and adapters are shared: only the key of --api-key may change them"
        )


def address_of_client(scope: Scope) -> str:
    """Return the address under which the client's connections are counted (`client_address`)."""
    return client_address((scope.get("client") or ("",))[0])


FORWARDED_HOST = "x-forwarded-host"
"""Header with the Host that a router or proxy received. Browsers do not let a page send this header
to another origin without that origin's permission. A page that sends it therefore has the server's
own origin, which the check of `Host` has already accepted.
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

    names: host names of the server, in addition to localhost and loopback addresses.
    origins: origins of pages that are allowed, or "*" for any.
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
        """Return an error if a page of another origin sent the request, otherwise None.

        Requests with an API key are accepted. Before a page can send a key, its browser sends an
        OPTIONS request, which the server always rejects.
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
    """Return True if the user followed a link. Such a request only reads, and no page gets the
    response.
    """
    return (
        method in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
