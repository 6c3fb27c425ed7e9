"""A cache of web servers' responses as RFC 9111 allows. hishel decides, and this file has the
bytes and the freshness lifetimes.

A response is fresh for as long as its server allows, counted from the request by the monotonic
clock. Without a lifetime, a response is revalidated before each use, as the image may have been
replaced. The caller's `send` brings a request to the server.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate, mktime_tz, parsedate_tz

import hishel
from cachetools import LRUCache

OPTIONS = hishel.CacheOptions(
    shared=True
)  # many users, one server: what an origin marks private is not kept
DIRECTIVE = re.compile(r'([a-z-]+)(?:\s*=\s*(?:"([^"]*)"|([^,\s]*)))?', re.IGNORECASE)
RULES = ("no-store", "no-cache", "private")
"""Directives that hishel is to hear as they are; it hears freshness in one form."""
MAX_FRESH = (1 << 31) - 1
"""Seconds: RFC 9111's own most."""
HEAD_BYTES = 2048
"""Counted for an answer beside its body."""
SETTLED = 2
"""Seconds from which on a date of change is told from the next: dates are in whole seconds."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete HTTP response."""

    status: int
    headers: hishel.Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """A stored response."""

    answer: HttpResponse
    stale: float  # when it must be checked, by `time.monotonic`
    validators: dict[str, str]  # validators

    @classmethod
    def of(cls, answer: HttpResponse, asked: float) -> CachedResponse:
        """Make the stored form of an answer.

        asked: the time of the question, by `time.monotonic`.
        """
        headers = answer.headers
        began = time.time() - (time.monotonic() - asked)
        names = ("etag", "last-modified") if settled(headers, began) else ("etag",)
        validators = {name: headers[name] for name in names if name in headers}
        return cls(answer, asked + freshness(headers, began), validators)

    def judged(self) -> hishel.Response:
        """Return the response as hishel is to judge it. Its freshness has one form, and `date` is
        now, so that hishel has no date to guess by.
        """
        given = directives(self.answer.headers)
        left = max(0, int(self.stale - time.monotonic()))
        rules = [name for name in RULES if name in given] + [f"max-age={left}"]
        headers = {"date": formatdate(usegmt=True), "cache-control": ", ".join(rules)}
        if "vary" in self.answer.headers:
            headers["vary"] = self.answer.headers["vary"]
        return hishel.Response(self.answer.status, hishel.Headers(headers | self.validators))

    def confirmed(self, newer: hishel.Headers, asked: float) -> CachedResponse:
        """Keep the same body after a 304, whose headers replace the stored ones."""
        before = _lists(self.answer.headers)
        for name in ("age", "date"):
            before.pop(name, None)
        headers = hishel.Headers(before | _lists(newer))
        return CachedResponse.of(HttpResponse(self.answer.status, headers, self.answer.body), asked)

    @property
    def useful(self) -> bool:
        """Return True if the answer could spare another."""
        fresh = self.stale > time.monotonic()
        return (fresh or bool(self.validators)) and "no-store" not in directives(
            self.answer.headers
        )


class HTTPCache:
    """Responses by URL and tenant. The least recently used are dropped beyond `size` bytes."""

    def __init__(self, size: int) -> None:
        self._kept: LRUCache[tuple[str, str], CachedResponse] = LRUCache(
            size, getsizeof=lambda kept: len(kept.answer.body) + HEAD_BYTES
        )

    async def get(
        self,
        url: str,
        salt: str,
        headers: hishel.Headers,
        send: Callable[[hishel.Headers], Awaitable[HttpResponse]],
    ) -> HttpResponse:
        """Answer a GET from the cache or through `send`. `send` may get more headers, to revalidate
        a stored answer.

        Only 200 and redirects are kept, so a failure is asked again. Raises as `send` does.
        """
        place = url, salt
        kept = self._kept.get(place)
        request = hishel.Request("GET", url, headers)
        stored = [hishel.Entry(uuid.uuid4(), request, kept.judged())] if kept else []
        state: hishel.State | None = hishel.IdleClient(OPTIONS).next(request, stored)
        answer, asked = HttpResponse(0, headers, b""), 0.0
        while True:
            match state:
                case hishel.CacheMiss() | hishel.NeedRevalidation():
                    asked = time.monotonic()
                    answer = await send(state.request.headers)
                    state = state.next(CachedResponse.of(answer, asked).judged())
                case hishel.NeedToBeUpdated():
                    assert kept is not None
                    kept = kept.confirmed(answer.headers, asked)
                    self._keep(place, kept)
                    state = state.next()
                case hishel.InvalidateEntries():
                    state = state.next()
                case hishel.FromCache():
                    assert kept is not None
                    return kept.answer
                case hishel.StoreAndUse() if answer.status == 200 or answer.status // 100 == 3:
                    self._keep(place, CachedResponse.of(answer, asked))
                    return answer
                case _:  # could not be stored
                    if answer.status < 500:  # the server has something else there now
                        self._kept.pop(place, None)
                    return answer

    def _keep(self, place: tuple[str, str], kept: CachedResponse) -> None:
        self._kept.pop(place, None)
        if kept.useful and len(kept.answer.body) + HEAD_BYTES <= self._kept.maxsize:
            self._kept[place] = kept


def freshness(headers: hishel.Headers, asked: float) -> int:
    """Return the freshness lifetime in seconds, counted from the request. A server
    that sets none means 0. asked: by `time.time`.

    A senseless number or date means 0 instead of an error, as in RFC 9111, 4.2.
    """
    given = directives(headers)
    if "no-cache" in given:
        return 0
    date, lifetime = _seconds(headers, "date"), 0.0
    if (rule := given.get("s-maxage", given.get("max-age"))) is not None:
        lifetime = _number(rule)
    elif (expires := _seconds(headers, "expires")) is not None:
        lifetime = expires - (asked if date is None else date)
    age = max(_number(headers.get("age", "")), 0 if date is None else int(asked - date))
    return int(min(max(0, lifetime - age), MAX_FRESH))


def settled(headers: hishel.Headers, asked: float) -> bool:
    """Return True if the last change was at least `SETTLED` seconds before the response. Content
    that changed later may change again within the same second. asked: by `time.time`.
    """
    date, changed = _seconds(headers, "date"), _seconds(headers, "last-modified")
    return changed is not None and (asked if date is None else date) - changed >= SETTLED


def directives(headers: hishel.Headers) -> dict[str, str]:
    """Return the directives in `Cache-Control`. Of several with one name, the first counts."""
    found: dict[str, str] = {}
    for name, quoted, plain in DIRECTIVE.findall(headers.get("cache-control", "")):
        found.setdefault(name.lower(), quoted or plain)
    return found


def _lists(headers: hishel.Headers) -> dict[str, list[str]]:
    return {name: headers.get_list(name) or [] for name in headers}


def _number(text: str) -> int:
    """Parse a header's seconds. All else means 0."""
    digits = text.strip().partition(",")[0]
    return int(digits[:11]) if digits.isascii() and digits.isdigit() else 0


def _seconds(headers: hishel.Headers, name: str) -> float | None:
    """Parse a header's date. Returns `None` if it is missing or malformed."""
    try:
        found = parsedate_tz(headers.get(name, ""))
        return None if found is None else mktime_tz(found)
    except (ValueError, OverflowError, TypeError):
        return None
