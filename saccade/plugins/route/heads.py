"""Requests' and answers' heads on their way through the router: the headers that go on, and those
for one connection only (RFC 9110, 7.6.1).
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
"""The router's own server writes it."""


def request_head(
    scope: Scope, authority: bytes, length: int, extra: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """Write a client's request head for a worker, with its id and a body of `length` bytes."""
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", b"host: " + authority]
    headers = scope["headers"]
    if not any(name == _FORWARDED_HOST for name, _ in headers):  # else a proxy's in front
        lines += [_FORWARDED_HOST + b": " + value for name, value in headers if name == b"host"]
    for name, value in (*_passing(headers, _WRITTEN_ANEW), *extra):
        lines.append(name + b": " + value)
    lines.append(b"x-request-id: " + request_id.get().encode())
    if length or scope["method"] in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join((*lines, b"", b""))


def answer_headers(answer: Head) -> Headers:
    """Return the headers for the client."""
    return _passing(answer.headers, _OF_AN_ANSWER)


def _passing(headers: Headers, but: Collection[bytes]) -> Headers:
    """Return the headers that pass: all but those for one connection.

    `connection`'s own list counts among these.
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
