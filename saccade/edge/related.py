"""JSON bodies that refer to bytes by digest instead of containing them: `multipart/related` (RFC
2387).

    --BOUNDARY                              the first part: the JSON, in which `cid:NAME@BOUNDARY`
    content-type: application/json          replaces the bytes' base64 (RFC 2392)

    {"image_url": "data:image/png;base64,cid:blake3-HEX@BOUNDARY"}
    --BOUNDARY                              a further part for each name whose bytes are attached
    content-id: <blake3-HEX>

    ...bytes
    --BOUNDARY--

A name is the digest of the bytes: `blake3-HEX` or `sha256-HEX`. A name without a part refers to
bytes that the same tenant has sent before. API handlers get exactly the JSON that the client would
otherwise have sent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
import pybase64
from blake3 import blake3

from saccade.core.client import Client
from saccade.core.decoders import json_decoder
from saccade.core.errors import InvalidRequest, UnknownDigests
from saccade.edge.sent_bytes import SentBytes

MAX_NAMES = 8192
"""Maximum number of references to bytes in one body: four times the number of frames in the longest
video.
"""
MAX_HEADERS = 1024
"""Maximum size of a part's headers, in bytes."""
MAX_BOUNDARY = 70

_BOUNDARY = re.compile(r'(?:^|;)\s*boundary="?([A-Za-z0-9_-]{16,70})"?\s*(?:;|$)', re.IGNORECASE)
_CONTENT_ID = re.compile(
    rb"^content-id:[ \t]*<((?:blake3|sha256)-[0-9a-f]{64})>[ \t]*\r?$", re.I | re.M
)
_NAME_BEFORE = re.compile(rb"cid:((?:blake3|sha256)-[0-9a-f]{64})\Z")
_MAX_DIGEST = len("cid:blake3-") + 64
_HEAD_END = b"\r\n\r\n"


class _Digest(Protocol):
    def hexdigest(self) -> str: ...


def _digest(name: str, data: bytes) -> str:
    kind = name.partition("-")[0]
    made: _Digest = blake3(data) if kind == "blake3" else hashlib.sha256(data)
    return f"{kind}-{made.hexdigest()}"


class _Scope(msgspec.Struct):
    cache_salt: Any = None


_SCOPE = json_decoder(_Scope)


class RelatedBody:
    """A parsed multipart/related body: its JSON, and the bytes attached to it."""

    def __init__(self, body: bytes | bytearray, boundary: str) -> None:
        """Parse a body, and check the bytes of each part against its digest. Raises
        InvalidRequest.
        """
        first, *others = _parts(body, boundary.encode())
        self.json = _content(first, 0)[1]  # still with names
        end = len(boundary) + len("\r\n--") + len(first)
        span = end - len(self.json), end
        self._places = list(_names(body, span, b"@" + boundary.encode()))
        self.names = list(dict.fromkeys(name for *_, name in self._places))
        self.brought = self._read(others)  # the attached bytes, by name

    def _read(self, parts: Iterable[memoryview]) -> dict[str, bytes]:
        brought: dict[str, bytes] = {}
        wanted = {*self.names}
        for number, part in enumerate(parts, 1):
            head, content = _content(part, number)
            found = _CONTENT_ID.search(head)
            if found is None:
                raise _malformed(f"part {number} has no Content-ID: <blake3-HEX> or <sha256-HEX>")
            name, data = found[1].decode(), bytes(content)
            if name not in wanted:
                raise _malformed(f"part {number}, {name}, is not referenced in the JSON")
            if _digest(name, data) != name:
                raise InvalidRequest(
                    f"the digest of part {number} is not {name}, which is in its Content-ID",
                    code="wrong_digest",
                )
            brought[name] = data
        return brought

    def find(self, sent: SentBytes, client: Client) -> dict[str, bytes]:
        """Store the attached bytes in `sent`, and return all bytes that the JSON refers to, by
        digest.

        Raises UnknownDigests with every digest whose bytes this tenant has not sent.
        """
        salt = self._salt()
        found, lacking = dict(self.brought), []
        for name in self.names:
            if name in found:
                continue
            if (kept := sent.get(client, salt, name)) is None:
                lacking.append(name)
            else:
                found[name] = kept
        for name, data in self.brought.items():  # after the lookups, because they may evict others
            sent.put(client, salt, name, data)
        if lacking:
            raise UnknownDigests(
                f"you have not sent the bytes of {len(lacking)} names, or they are no longer "
                f"stored: include them as parts, or in the JSON: {lacking[0]}",
                tuple(lacking),
            )
        return found

    def size(self, found: Mapping[str, bytes]) -> int:
        """Return the size in bytes of the JSON with base64 instead of references. found: the bytes
        by digest.
        """
        grown = ((len(found[name]) + 2) // 3 * 4 - (end - at) for at, end, name in self._places)
        return len(self.json) + sum(grown)

    def whole(self, found: Mapping[str, bytes]) -> bytearray:
        """Return the JSON with base64 instead of references. found: the bytes by digest."""
        made, begun = bytearray(), 0
        for at, end, name in self._places:
            made += self.json[begun:at]
            made += pybase64.b64encode(found[name])
            begun = end
        made += self.json[begun:]
        return made

    def _salt(self) -> str:
        """Return the `cache_salt` in the JSON, or "" if it is missing or the JSON is invalid."""
        try:
            salt = _SCOPE.decode(self.json).cache_salt
        except (msgspec.DecodeError, ValueError, RecursionError):
            return ""
        return salt if isinstance(salt, str) else ""


def _names(
    body: bytes | bytearray, span: tuple[int, int], mark: bytes
) -> Iterator[tuple[int, int, str]]:
    """Yield the start, the end and the digest of each reference in the JSON at `span`.

    Searches for `mark`, which is "@" and the boundary. The client chooses a boundary that occurs
    only in references. Raises InvalidRequest for too many references.
    """
    start, last = span
    end = start
    for _ in range(MAX_NAMES):
        if (at := body.find(mark, end, last)) < 0:
            return
        end = at + len(mark)
        name = _NAME_BEFORE.search(body, max(start, at - _MAX_DIGEST), at)
        if name is not None:
            yield name.start() - start, end - start, name[1].decode()
    if body.find(mark, end, last) >= 0:
        raise _too_many(f"has more than {MAX_NAMES} references to bytes")


def _parts(body: bytes | bytearray, boundary: bytes) -> list[memoryview]:
    mark = b"\r\n--" + boundary
    if not body.startswith(mark[2:] + b"\r\n"):
        raise _malformed("it does not begin with its boundary")
    view, begun, parts = memoryview(body), len(mark), []
    while (end := body.find(mark, begun)) >= 0:
        parts.append(view[begun:end])
        begun = end + len(mark) + 2
        after = body[begun - 2 : begun]
        if after == b"--":
            return parts
        if after != b"\r\n":
            break
        if len(parts) > MAX_NAMES:
            raise _too_many(f"has more than {MAX_NAMES} parts after the JSON")
    raise _malformed("it does not end with its boundary")


def _content(part: memoryview, number: int) -> tuple[bytes, memoryview]:
    head = bytes(part[:MAX_HEADERS])
    if (end := head.find(_HEAD_END)) < 0:
        raise _malformed(f"the headers of part {number} do not end within {MAX_HEADERS} bytes")
    return head[:end], part[end + len(_HEAD_END) :]


def _malformed(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the body is not valid multipart/related: {why}", code="invalid_multipart"
    )


def _too_many(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the body {what}, the limit: send fewer images, or send them in the JSON",
        code="too_many_names",
    )


def boundary_of(content_type: str) -> str:
    """Return the boundary in a Content-Type header. Raises InvalidRequest if it is missing or
    unsuitable.
    """
    found = _BOUNDARY.search(content_type.partition(";")[2])
    if found is None:
        raise _malformed(
            "Content-Type must give a boundary of 16 to 70 letters, digits, hyphens and underscores"
        )
    return found[1]


def first_part(body: bytes | bytearray) -> memoryview:
    """Return the JSON of a multipart body without checking the other parts, or empty bytes if it is
    malformed.
    """
    head = bytes(body[2 : MAX_BOUNDARY + 4])
    try:
        return _content(_parts(body, head.partition(b"\r\n")[0])[0], 0)[1]
    except InvalidRequest:
        return memoryview(b"")


def name_at_end(given: str) -> str | None:
    """Return the digest at the end of a data: URL that refers to stored bytes, or None if it
    contains base64.
    """
    found = _AT_END.search(given, max(0, len(given) - _MAX_NAME))
    return None if found is None else found[1]


_AT_END = re.compile(r"cid:((?:blake3|sha256)-[0-9a-f]{64})@[A-Za-z0-9_-]{16,70}\Z")
_MAX_NAME = len("cid:blake3-@") + 64 + MAX_BOUNDARY
