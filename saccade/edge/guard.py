"""The web pages that may use a server without a key: its own, and those of --cors-origins.

A server on a loopback address is out of reach for other machines, but not for the local browser,
whose pages may send requests to any address. `Host` exposes a page that has pointed its own name at
this machine (DNS rebinding). `Origin` and `Sec-Fetch-Site` expose a page with a foreign origin.
Browsers write these headers themselves, and other clients send neither. Owns the rules, for servers
and routers. Knows nothing of keys or routes.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.core.errors import Forbidden, RequestError
from saccade.edge.headers import given_key, request_id
from saccade.edge.refusal import refusal

FORWARDED_HOST = "x-forwarded-host"
"""Where a router or proxy says which Host it was asked for. No page can send it to another origin
without being allowed to, so a page that can send it is one that `Host` has let through.
"""
_SHOWN = 200


def is_loopback(host: str) -> bool:
    """Return True if the listening address stands for this machine alone."""
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, None)} if host else set()
    except (OSError, UnicodeError):
        return False  # it cannot be listened on either, which is told elsewhere
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)


class Guard:
    """The application, closed to pages with foreign origins.

    `names`: the server's names, beside this machine's. `origins`: admitted pages, "*" for any.
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
        if given is None or self._is_ours(given):  # HTTP/1.0, which no browser speaks, has none
            return None
        return Forbidden(
            f"Host is {given[:_SHOWN]!r}: without a key, a server on a loopback address answers to "
            "localhost and loopback addresses only, lest web pages use it: start it with "
            "--allowed-hosts NAME to add a name, or with --api-key"
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
        """Return the refusal for a page with a foreign origin, or None.

        Before a page can send a key its browser asks by OPTIONS, which is always refused.
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
            "server serves no page but its own: start it with --cors-origins ORIGIN to let one in"
        )

    def _is_same(self, origin: str, site: str, headers: Headers) -> bool:
        """Return True if the page is this server's own."""
        if site:
            return site == "same-origin"
        asked = {headers.get("host"), headers.get(FORWARDED_HOST)} - {None}
        return origin.partition("://")[2] in asked


def _is_link(method: str, headers: Headers) -> bool:
    """Return True for a followed link: the request only reads, and pages miss the answer."""
    return (
        method in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
