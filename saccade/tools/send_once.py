"""How a client sends bytes once: what it sends instead of a body, and what an answer makes of it.

    NamedBody            a body whose base64 may be replaced by names
    ServerConversation   with one server: what it reads, and what it has been sent

Names are digests, and bodies are `multipart/related`, as `edge/related.py` reads them. Looks for
base64 only, so every dialect works. Does not send itself: a conversation's flow yields what to
send, and takes what came of it.
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
"""Characters of base64 from which a name is worth its place."""
MAX_NAMES = 8192
"""Times that a body names bytes, as servers read them."""
MAX_REMEMBERED = 1 << 16
"""Names that a server is known to have."""
MAX_REFUSAL = 1 << 20
"""Bytes of a refusal that are read."""
MAX_UNASKED = 2
"""Images that are sent along unasked. Of more the server may have some, from an earlier run."""
_HEAD = 512
"""Characters before the base64 of a data: URL."""
_BEGINS = re.compile(rb"[A-Za-z0-9+/]{64}")
_IN_BASE64 = b";base64,"


Body = bytes | bytearray


@dataclass(frozen=True, slots=True)
class Attempt:
    """A body to send. content_type: None for the client's own body and type. names: how many are
    in it, and how many of them with their bytes.
    """

    body: Body
    content_type: str | None = None
    named: int = 0
    brought: int = 0


@dataclass(frozen=True, slots=True)
class VersionQuestion:
    """A question: GET /version."""


@dataclass(frozen=True, slots=True)
class AttemptReply:
    """What came of an attempt or a question. body: of a refusal with 400, and of a question."""

    status: int
    body: bytes = b""


Flow = Generator[Attempt | VersionQuestion, AttemptReply, None]


@dataclass(slots=True)
class Savings:
    """What was saved: bytes of bodies as clients sent them, and as they went on; images by how they
    went. Several threads may count.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    sent: int = 0
    named: int = 0
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
    """A body, and the places where JSON strings hold base64. names: their digests, in order."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._places = list(_named(body))
        self.names = tuple(dict.fromkeys(name for *_, name in self._places))

    def related(self, brought: Collection[str]) -> Attempt:
        """Write the body with names, and these names' bytes behind it."""
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
    """Yield the position of base64, and its bytes' name. Skips base64 that would not round-trip."""
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
    """Yield the long texts that begin like base64 and end a JSON string.

    Each long string covers a block of half its length, so only blocks are searched for quotes.
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
    """The fields of both APIs' errors that matter here."""

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
    """The conversation with one server. Several requests may be on their way at a time."""

    savings: Savings = field(default_factory=Savings)
    _reads: bool | None = None
    _known: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)
    """By sender and name."""

    def flow(self, body: Body, sender: str = "") -> Flow:
        """Yield what to send for a JSON body, until an answer is the client's.

        sender: the key, which separates tenants.
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
        """Yield a body as it is."""
        self.savings.count_body(body)
        yield self._counted(Attempt(body))

    def _send_named(self, named: NamedBody, sender: str) -> Generator[Attempt, AttemptReply, bool]:
        """Send a body by names, and what the server lacks once more. Returns False where the body
        has to go as it is.
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
"""Codes of a server that has no such bodies any more."""
_NO_NAMES = ("unknown_digests", "invalid_multipart", "wrong_digest", "too_many_names")
"""Codes about names alone, which a client without them never sees."""


def reads_names(reply: AttemptReply) -> bool | None:
    """Return whether a server reads bodies with names, by its /version. None: ask again later."""
    if reply.status >= 500 or reply.status == 429:
        return None
    try:
        accepts = _VERSION.decode(reply.body).accepts
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return reply.status == 200 and "multipart/related" in accepts


def refusal(reply: AttemptReply) -> tuple[str | None, tuple[str, ...]]:
    """Return a refusal's code, and the names whose bytes the server lacks."""
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
    """Return True for a request whose body may be sent by names."""
    kind = content_type.partition(";")[0].strip().lower()
    return method == "POST" and kind == "application/json" and not content_encoding
