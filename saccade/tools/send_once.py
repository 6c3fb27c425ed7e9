"""Sends the bytes of each image to a server only once. Later requests contain their digest instead.

    NamedBody            a body in which base64 data can be replaced by names
    ServerConversation   what is known about one server: whether it supports names, and which bytes
                         it has

Names are digests, and bodies are sent as `multipart/related`, which `edge/related.py` reads. The
body is only searched for base64, so this works with all APIs. This module does no I/O: a flow is a
generator that yields the bytes to send, and receives the server's reply.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field
from threading import Lock

import msgspec
import pybase64
from blake3 import blake3

LEAST = 1024
"""The minimum characters of base64 that are replaced by a name."""
MAX_NAMES = 8192
"""The maximum names in one body that servers accept."""
MAX_REMEMBERED = 1 << 16
"""The maximum names to remember per server."""
MAX_REFUSAL = 1 << 20
"""The maximum bytes of an error response that are read."""
MAX_UNASKED = 2
"""Up to this many unknown images are sent with the first attempt. If there are more, only names are
sent first, because the server may have some of them from an earlier run of this client.
"""
_HEAD = 512
"""The maximum characters before the base64 data of a data: URL."""
_BEGINS = re.compile(rb"[A-Za-z0-9+/]{64}")
_IN_BASE64 = b";base64,"


Body = bytes | bytearray


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request body to send."""

    body: Body
    content_type: str | None = None  # `None` for the client's own body and content type
    named: int = 0  # how many names the body contains
    brought: int = 0  # how many of these are sent with their bytes


@dataclass(frozen=True, slots=True)
class VersionQuestion:
    """A request of GET /version, to find out whether the server supports names."""


@dataclass(frozen=True, slots=True)
class AttemptReply:
    """The response to an attempt, or to a version request."""

    status: int
    body: bytes = b""  # of a version request, or of an error with status 400; otherwise empty


Flow = Generator[Attempt | VersionQuestion, AttemptReply, None]


@dataclass(slots=True)
class Savings:
    """Counts the saved bytes and images. It is thread-safe."""

    bytes_in: int = 0  # bytes of bodies, as received from clients
    bytes_out: int = 0  # bytes of bodies, as sent to servers
    sent: int = 0  # images sent with their bytes
    named: int = 0  # images sent by name only
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def count_body(self, body: Body) -> None:
        with self._lock:
            self.bytes_in += len(body)

    def count(self, attempt: Attempt) -> None:
        with self._lock:
            self.bytes_out += len(attempt.body)
            self.sent += attempt.brought
            self.named += attempt.named - attempt.brought

    def __str__(self) -> str:
        images = f"{self.sent} images sent and {self.named} referenced by hash"
        return f"{self.bytes_in} bytes of bodies were sent as {self.bytes_out}: {images}"


class NamedBody:
    """A JSON body, and the positions of base64 data in its strings. `names` are the distinct names
    of that data, in order.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self._places = list(_named(body))
        self.names = tuple(dict.fromkeys(name for *_, name in self._places))

    def related(self, brought: Collection[str]) -> Attempt:
        """Build a multipart body: the JSON with names, followed by the bytes of `brought`."""
        boundary = secrets.token_hex(12)
        mark, view = boundary.encode(), memoryview(self.body)
        pieces: list[bytes | memoryview] = [_part(mark, b"content-type: application/json")[2:]]
        begun = 0
        found: dict[str, memoryview] = {}
        for at, end, name in self._places:
            found[name] = view[at:end]
            pieces += (view[begun:at], b"cid:", name.encode(), b"@", mark)
            begun = end
        pieces.append(view[begun:])
        for name in brought:
            head = _part(mark, b"content-id: <" + name.encode() + b">")
            pieces += (head, pybase64.b64decode(found[name]))
        pieces += (b"\r\n--", mark, b"--\r\n")
        kind = f'multipart/related; boundary="{boundary}"; type="application/json"'
        return Attempt(bytearray().join(pieces), kind, len(self._places), len(brought))


def _part(mark: bytes, header: bytes) -> bytes:
    return b"".join((b"\r\n--", mark, b"\r\n", header, b"\r\n\r\n"))


def _named(body: Body) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, name) of base64 data. Data that encoding would not reproduce exactly is
    skipped.
    """
    view, count = memoryview(body), 0
    for at, end in _candidates(body):
        try:
            data = pybase64.b64decode(view[at:end], validate=True)
        except ValueError:
            continue
        if pybase64.b64encode(data) == view[at:end]:
            yield at, end, f"blake3-{blake3(data).hexdigest()}"
            count += 1
            if count == MAX_NAMES:
                return


def _candidates(body: Body) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of long JSON strings, or of the data in their data: URLs, that start like
    base64.

    A string of at least `LEAST` characters contains a complete block of half that size without a
    quote. So it suffices to look for blocks without quotes.
    """
    begun, block = 0, LEAST // 2
    start = 0
    while start + block <= len(body):
        if body.find(b'"', start, start + block) < 0:
            begun = body.rfind(b'"', begun, start) + 1 or begun
            if (end := body.find(b'"', start + block)) < 0:
                return
            if end - begun >= LEAST:
                found = body.find(_IN_BASE64, begun, begun + _HEAD)
                at = begun if found < 0 else found + len(_IN_BASE64)
                if end - at >= LEAST and (end - at) % 4 == 0 and _BEGINS.match(body, at):
                    yield at, end
            begun = end + 1
            start += (begun - start) // block * block
        else:
            start += block


class _ErrorWords(msgspec.Struct):
    """The relevant fields of an error. `details` is Anthropic's form, the other fields OpenAI's."""

    code: str | None = None
    digests: tuple[str, ...] = ()
    details: _Details | None = None


class _Details(msgspec.Struct):
    error_code: str | None = None
    digests: tuple[str, ...] = ()


class _Refusal(msgspec.Struct):
    error: _ErrorWords


class _Version(msgspec.Struct):
    accepts: tuple[str, ...] = ()


_REFUSAL = msgspec.json.Decoder(_Refusal)
_VERSION = msgspec.json.Decoder(_Version)


@dataclass(slots=True)
class ServerConversation:
    """What is known about one server. Several requests may be in flight at a time."""

    savings: Savings = field(default_factory=Savings)
    _reads: bool | None = None
    _known: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)
    """The names whose bytes the server has, as (sender, name). Least recently used first."""

    def flow(self, body: Body, sender: str = "") -> Flow:
        """Yield the messages to send for a JSON body, and receive the reply to each. The reply to
        the last one is the response for the client.

        `sender` identifies the API key, because tenants cannot refer to each other's bytes.
        """
        self.savings.count_body(body)
        named = NamedBody(body)
        if named.names:
            if self._reads is None:
                self._reads = reads_names((yield VersionQuestion()))
            if self._reads and (yield from self._send_named(named, sender)):
                return
        yield self._counted(Attempt(body))

    def unchanged(self, body: Body) -> Flow:
        """Yield a body unchanged."""
        self.savings.count_body(body)
        yield self._counted(Attempt(body))

    def _send_named(self, named: NamedBody, sender: str) -> Generator[Attempt, AttemptReply, bool]:
        """Send a body with names. If the server does not have some bytes, send it again with these.
        Returns False if the unchanged body must be sent instead.
        """
        brought: Collection[str] = [n for n in named.names if (sender, n) not in self._known]
        if len(brought) > MAX_UNASKED:
            brought = ()
        for _ in range(2):
            reply = yield self._counted(named.related(brought))
            code, lacking = refusal(reply)
            if code in _NOT_READ:
                self._reads = None
                return False
            if code not in _NO_NAMES:
                if reply.status < 400:
                    self._remember(sender, named.names)
                return True
            for name in lacking:
                self._known.pop((sender, name), None)
            brought = {*lacking}.intersection(named.names)
        return False

    def _remember(self, sender: str, names: Collection[str]) -> None:
        for name in names:
            self._known.pop((sender, name), None)
            self._known[sender, name] = None
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    def _counted(self, attempt: Attempt) -> Attempt:
        self.savings.count(attempt)
        return attempt


_NOT_READ = ("unsupported_media_type",)
"""Error codes of a server that does not (or no longer) support names."""
_NO_NAMES = ("unknown_digests", "invalid_multipart", "wrong_digest", "too_many_names")
"""Error codes that concern names, and so must not be passed to the client."""


def reads_names(reply: AttemptReply) -> bool | None:
    """Return whether a server supports names, from its reply to GET /version. Returns `None` if
    that must be requested again later.
    """
    if reply.status >= 500 or reply.status == 429:
        return None
    try:
        accepts = _VERSION.decode(reply.body).accepts
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return reply.status == 200 and "multipart/related" in accepts


def refusal(reply: AttemptReply) -> tuple[str | None, tuple[str, ...]]:
    """Return the code of an error, and the names whose bytes the server does not have."""
    if reply.status == 415:
        return "unsupported_media_type", ()
    if reply.status != 400:
        return None, ()
    try:
        told = _REFUSAL.decode(reply.body).error
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None, ()
    if told.details is not None:
        return told.details.error_code, told.details.digests
    return told.code, told.digests


def plain_json(method: str, content_type: str, content_encoding: str) -> bool:
    """Return True if the request has an uncompressed JSON body, in which names can be used."""
    kind = content_type.partition(";")[0].strip().lower()
    return method == "POST" and kind == "application/json" and not content_encoding
