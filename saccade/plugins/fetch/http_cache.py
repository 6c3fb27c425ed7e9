"""A cache of HTTP responses that follows RFC 9111. hishel implements the rules, and this file
stores the bytes and freshness lifetimes.

A response is fresh for as long as its server specifies, counted from the request by the monotonic
clock. If no lifetime is specified, a response is revalidated before each use, since the image may
have been replaced. The caller's `send` performs requests.
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
)  # a shared cache does not store responses that are marked private
DIRECTIVE = re.compile(r'([a-z-]+)(?:\s*=\s*(?:"([^"]*)"|([^,\s]*)))?', re.IGNORECASE)
RULES = ("no-store", "no-cache", "private")
"""Directives that are passed to hishel unchanged. Freshness is passed only as max-age."""
MAX_FRESH = (1 << 31) - 1
"""Maximum lifetime in seconds, as in RFC 9111, 1.2.2."""
HEAD_BYTES = 2048
"""The bytes that a response counts as in addition to its body."""
SETTLED = 2
"""Minimum age in seconds at which a modification date identifies the content. Dates have a
resolution of one second.
"""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete HTTP response."""

    status: int
    headers: hishel.Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """A response in the cache."""

    answer: HttpResponse
    stale: float  # the end of its freshness, by `time.monotonic`
    validators: dict[str, str]  # headers for revalidation

    @classmethod
    def of(cls, answer: HttpResponse, asked: float) -> CachedResponse:
        """Create the stored form of a response.

        asked: the time of the request, from `time.monotonic`.
        """
        headers = answer.headers
        began = time.time() - (time.monotonic() - asked)
        names = ("etag", "last-modified") if settled(headers, began) else ("etag",)
        validators = {name: headers[name] for name in names if name in headers}
        return cls(answer, asked + freshness(headers, began), validators)

    def judged(self) -> hishel.Response:
        """Return the response for hishel to judge. Its remaining freshness is passed as max-age,
        and `date` is the current time, so that hishel uses no heuristics.
        """
        given = directives(self.answer.headers)
        left = max(0, int(self.stale - time.monotonic()))
        rules = [name for name in RULES if name in given] + [f"max-age={left}"]
        headers = {"date": formatdate(usegmt=True), "cache-control": ", ".join(rules)}
        if "vary" in self.answer.headers:
            headers["vary"] = self.answer.headers["vary"]
        return hishel.Response(self.answer.status, hishel.Headers(headers | self.validators))

    def confirmed(self, newer: hishel.Headers, asked: float) -> CachedResponse:
        """Return the same body with the headers of a 304 response, which replace the stored ones.

        asked: the time of the request, from `time.monotonic`.
        """
        before = _lists(self.answer.headers)
        for name in ("age", "date"):
            before.pop(name, None)
        headers = hishel.Headers(before | _lists(newer))
        return CachedResponse.of(HttpResponse(self.answer.status, headers, self.answer.body), asked)

    @property
    def useful(self) -> bool:
        """True if caching the response can save a later request or a transfer."""
        fresh = self.stale > time.monotonic()
        return (fresh or bool(self.validators)) and "no-store" not in directives(
            self.answer.headers
        )


class HTTPCache:
    """An LRU cache of responses by URL and tenant, limited to `size` bytes."""

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
        """Answer a GET request from the cache or with `send`, which gets additional headers if a
        stored response has to be revalidated.

        Only status 200 and redirects are cached, so failures are retried. Raises the exceptions of
        `send`.
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
                case _:  # the response cannot be stored
                    if answer.status < 500:  # and the stored one is outdated
                        self._kept.pop(place, None)
                    return answer

    def _keep(self, place: tuple[str, str], kept: CachedResponse) -> None:
        self._kept.pop(place, None)
        if kept.useful and len(kept.answer.body) + HEAD_BYTES <= self._kept.maxsize:
            self._kept[place] = kept


def freshness(headers: hishel.Headers, asked: float) -> int:
    """Return the freshness lifetime in seconds, counted from the request, or 0 if the server
    specifies none.

    asked: the time of the request, from `time.time`.

    As in RFC 9111, 4.2, an invalid number or date means 0 and is not an error.
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
    """Return True if the content was last modified at least `SETTLED` seconds before the response.
    More recent content may change again within the same second.

    asked: the time of the request, from `time.time`, which is used if the response has no date.
    """
    date, changed = _seconds(headers, "date"), _seconds(headers, "last-modified")
    return changed is not None and (asked if date is None else date) - changed >= SETTLED


def directives(headers: hishel.Headers) -> dict[str, str]:
    """Return the directives in `Cache-Control`. If several have the same name, the first one is
    used.
    """
    found: dict[str, str] = {}
    for name, quoted, plain in DIRECTIVE.findall(headers.get("cache-control", "")):
        found.setdefault(name.lower(), quoted or plain)
    return found


def _lists(headers: hishel.Headers) -> dict[str, list[str]]:
    return {name: headers.get_list(name) or [] for name in headers}


def _number(text: str) -> int:
    """Parse a number of seconds in a header. Returns 0 if it is invalid."""
    digits = text.strip().partition(",")[0]
    return int(digits[:11]) if digits.isascii() and digits.isdigit() else 0


def _seconds(headers: hishel.Headers, name: str) -> float | None:
    """Parse a date in a header as seconds since the epoch. Returns `None` if it is missing or
    malformed.
    """
    try:
        found = parsedate_tz(headers.get(name, ""))
        return None if found is None else mktime_tz(found)
    except (ValueError, OverflowError, TypeError):
        return None
