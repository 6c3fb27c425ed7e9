"""Sends the bytes of each image to a server only once. Later requests contain a digest instead.

    NamedBody            a body in which base64 data can be replaced by digests ("names")
    ServerConversation   what is known about one server: whether it accepts digests, and which bytes
                         it has

Bodies with digests are sent as `multipart/related`, which `edge/related.py` reads. The body is only
searched for base64, so this works with all APIs. This module does no I/O: a `Flow` is a generator
that yields the bodies to send, and receives the server's replies.
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
"""Minimum number of base64 characters that are replaced by a digest."""
MAX_NAMES = 8192
"""Maximum number of digests in one body that servers accept."""
MAX_REMEMBERED = 1 << 16
"""Maximum number of digests to remember for each server."""
MAX_REFUSAL = 1 << 20
"""Maximum number of bytes that are read of an error response."""
MAX_UNASKED = 2
"""Up to this many unknown images are sent with the first attempt. If there are more, only digests
are sent at first, because the server may still have the images from an earlier run of this client.
"""
_HEAD = 512
"""Maximum number of characters before the base64 data in a data: URL."""
_BEGINS = re.compile(rb"[A-Za-z0-9+/]{64}")
_IN_BASE64 = b";base64,"


Body = bytes | bytearray


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request body to send, and how many digests and images it contains."""

    body: Body
    content_type: str | None = None  # `None` for the client's own body and content type
    named: int = 0  # how many names the body contains
    brought: int = 0  # how many of these are sent with their bytes


@dataclass(frozen=True, slots=True)
class VersionQuestion:
    """A GET request for /version, whose response tells whether the server accepts digests."""


@dataclass(frozen=True, slots=True)
class AttemptReply:
    """The server's response to an `Attempt` or a `VersionQuestion`."""

    status: int
    body: bytes = b""  # of a version request, or of an error with status 400; otherwise empty


Flow = Generator[Attempt | VersionQuestion, AttemptReply, None]


@dataclass(slots=True)
class Savings:
    """Counts the bytes and images that were not sent again. Thread-safe."""

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
    """A JSON body, and the positions of base64 data in its strings. `names` has the distinct
    digests of that data, in order.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self._places = list(_named(body))
        self.names = tuple(dict.fromkeys(name for *_, name in self._places))

    def related(self, brought: Collection[str]) -> Attempt:
        """Build a multipart body: the JSON with digests, then the bytes of those in `brought`."""
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
    """Yield (start, end, digest) of each piece of base64 data. Data that would not be the same
    after decoding and encoding is skipped.
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
    """Yield (start, end) of long JSON strings that start like base64, or of the data in their data:
    URLs.

    A string of at least `LEAST` characters contains a complete block of half that size without a
    quote. So it suffices to search for blocks without quotes.
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
    """The fields of an error that this client reads. `details` is in Anthropic's format, the other
    fields in OpenAI's.
    """

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
    """What is known about one server: whether it accepts digests, and which bytes it has. Several
    requests may be in flight.
    """

    savings: Savings = field(default_factory=Savings)
    _reads: bool | None = None
    _known: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)
    """The digests whose bytes the server has, as (sender, digest), the least recently used
    first.
    """

    def flow(self, body: Body, sender: str = "") -> Flow:
        """Yield what to send for a JSON body, one message after the other, and receive the reply to
        each. The last reply is the response for the client.

        sender: identifies the API key, because tenants cannot refer to each other's bytes.
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
        """Yield a single attempt, which sends the body unchanged."""
        self.savings.count_body(body)
        yield self._counted(Attempt(body))

    def _send_named(self, named: NamedBody, sender: str) -> Generator[Attempt, AttemptReply, bool]:
        """Send a body with digests. If the server lacks some bytes, send it again with these
        attached.

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
"""Codes of errors from a server that does not, or no longer, accept digests."""
_NO_NAMES = ("unknown_digests", "invalid_multipart", "wrong_digest", "too_many_names")
"""Codes of errors about digests. The client's own request has none, so these are not passed on to
it.
"""


def reads_names(reply: AttemptReply) -> bool | None:
    """Return whether a server accepts digests, given its response to GET /version. Returns `None`
    if unknown, so that it must be requested again later.
    """
    if reply.status >= 500 or reply.status == 429:
        return None
    try:
        accepts = _VERSION.decode(reply.body).accepts
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return reply.status == 200 and "multipart/related" in accepts


def refusal(reply: AttemptReply) -> tuple[str | None, tuple[str, ...]]:
    """Return the code of an error response, if any, and the digests whose bytes the server
    lacks.
    """
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
    """Return True if a request has an uncompressed JSON body, in which base64 can be replaced by
    digests.
    """
    kind = content_type.partition(";")[0].strip().lower()
    return method == "POST" and kind == "application/json" and not content_encoding
