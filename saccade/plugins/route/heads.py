"""Selects the headers of requests and responses that the router forwards. Headers that concern only
one connection are removed (RFC 9110, 7.6.1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from starlette.types import Scope

from saccade.edge.headers import FORWARDED_HOST, SUFFIX_HEADER, request_id
from saccade.edge.upstream import Head, Headers

_OF_A_CONNECTION = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_WRITTEN_ANEW = frozenset(
    (b"host", b"content-length", b"expect", b"x-request-id", SUFFIX_HEADER.encode())
)

_FORWARDED_HOST = FORWARDED_HOST.encode()
_OF_AN_ANSWER = frozenset((b"date",))
"""Response headers that the router's HTTP server sets itself."""


def request_head(
    scope: Scope, authority: bytes, length: int, extra: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """Return the request line and headers to send to a worker.

    authority: the value of the Host header.
    length: the length of the body.
    extra: headers to add.
    """
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", b"host: " + authority]
    headers = scope["headers"]
    # unless a proxy in front has set it
    if not any(name == _FORWARDED_HOST for name, _ in headers):
        lines += [_FORWARDED_HOST + b": " + value for name, value in headers if name == b"host"]
    for name, value in (*_passing(headers, _WRITTEN_ANEW), *extra):
        lines.append(name + b": " + value)
    lines.append(b"x-request-id: " + request_id.get().encode())
    if length or scope["method"] in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join((*lines, b"", b""))


def answer_headers(answer: Head) -> Headers:
    """Return those headers of a response that are forwarded to the client."""
    return _passing(answer.headers, _OF_AN_ANSWER)


def _passing(headers: Headers, but: Collection[bytes]) -> Headers:
    """Return all headers except `but`, those that concern only one connection, and those that the
    `connection` header lists.
    """
    named = {
        part.strip().lower()
        for name, value in headers
        if name == b"connection"
        for part in value.split(b",")
    }
    return [
        (name, value)
        for name, value in headers
        if name not in _OF_A_CONNECTION and name not in but and name not in named
    ]
