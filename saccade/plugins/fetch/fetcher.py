"""Reads the bytes of images by URL: `data:`, `http(s):`, or `file:` below one allowed directory.

Bytes, seconds, redirects and hosts are limited. Concurrent fetches of one URL are combined
(`single_flight.py`), and a fetch waits for its turn (`fairness.py`) before its timeout starts.
`network.py` decides which addresses are allowed, `http_cache.py` caches responses as far as servers
allow, and `content_coding.py` decodes them. The fetcher follows redirects itself, so that every hop
is checked.
"""

from __future__ import annotations

import asyncio
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes, urlsplit

import hishel
import httpcore
import httpx

from saccade.core.errors import ImageError
from saccade.core.metrics import Metrics
from saccade.core.options import ServeOptions
from saccade.core.shown_url import shown_url
from saccade.media.sources.fairness import FairPermits, Requester
from saccade.media.sources.inline import InlineBytes
from saccade.media.sources.single_flight import ByteFlight, SingleFlight
from saccade.plugins.fetch.content_coding import ContentDecoder
from saccade.plugins.fetch.http_cache import HTTPCache, HttpResponse
from saccade.plugins.fetch.network import GIVEN_UP, PinnedNetwork, Resolve, resolve
from saccade.plugins.fetch.options import FetchOptions

MAX_REDIRECTS = 5
MAX_FETCHES = 128
"""Maximum concurrent fetches; more wait for their turn. httpcore must not queue requests itself,
because it leaks connections if a waiting request is cancelled.
"""
CLIENT_FETCHES = 64
REQUEST_FETCHES = 32
"""Maximum concurrent fetches for one client, and for one request."""
LOCAL_READS, CLIENT_READS, REQUEST_READS = 32, 16, 8
"""Number of threads that read `file:` URLs, and the maximum for one client and for one request."""
PATIENCE = 12
"""The maximum wait of a fetch for its turn, as a multiple of `fetch_timeout`."""
CONNECT_TIMEOUT = 5.0
REDIRECTS = {301, 302, 303, 307, 308}
HEADERS = hishel.Headers(
    {"User-Agent": "saccade", "Accept": "image/*, */*;q=0.1", "Accept-Encoding": "identity"}
)
CACHE_BYTES = 256 << 20
"""Maximum bytes of cached responses, which are stored only if their servers allow it."""


@dataclass(slots=True)
class _Trip:
    """The state of a fetch that may be redirected: its timeout, and its latest request to a
    server.
    """

    flight: ByteFlight
    clock: asyncio.Timeout
    exchange: asyncio.Task[HttpResponse] | None = None


class Fetcher:
    """Fetches URLs for one server. `close` closes all connections."""

    def __init__(self, options: ServeOptions, metrics: Metrics, resolve: Resolve = resolve) -> None:
        self._options = own = options.of(FetchOptions)
        self._max_bytes = options.media.max_image_bytes
        self._metrics = metrics
        self._inline = InlineBytes(self._max_bytes)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            max_connections=None,
            max_keepalive_connections=MAX_FETCHES,
            keepalive_expiry=30.0,
            network_backend=PinnedNetwork(own.allow_private_media, resolve),
        )
        self._cache = HTTPCache(CACHE_BYTES)
        self._turns = FairPermits(MAX_FETCHES, CLIENT_FETCHES, REQUEST_FETCHES)
        self._flights = SingleFlight(self._turns.enter)
        self._disk_turns = FairPermits(LOCAL_READS, CLIENT_READS, REQUEST_READS)
        self._local = SingleFlight(self._disk_turns.enter)
        self._readers = ThreadPoolExecutor(LOCAL_READS, "saccade-local")
        self._exchanges: set[asyncio.Task[HttpResponse]] = set()

    async def fetch(self, url: str, salt: str, requester: Requester | None = None) -> bytes:
        """Return the bytes that a URL refers to. Bytes that are not part of the request count
        against the requester's budget.

        Raises ImageError if the bytes are missing or forbidden, TooLarge beyond `max_image_bytes`,
        and Overloaded if the budget is used up, or the request had to wait longer than `PATIENCE`.
        """
        requester = requester or Requester()
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await self._inline.decode_url(url)
        if scheme in ("http", "https"):
            return await self._flights.join(
                (url, salt), requester, lambda flight: self._fetch_http(flight, url, salt)
            )
        if scheme == "file":
            return await self._local.join(url, requester, partial(self._read_local, url))
        raise ImageError(
            "an image's URL must start with data:, https:, http: or file:",
            code="invalid_image_url",
        )

    async def close(self) -> None:
        await asyncio.gather(self._flights.close(), self._local.close())
        self._readers.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await self._pool.aclose()

    # ---- http: and https:

    async def _fetch_http(self, flight: ByteFlight, url: str, salt: str) -> bytes:
        shown, trip = shown_url(url), _Trip(flight, asyncio.timeout(None))
        try:
            async with trip.clock:
                return await self._follow(trip, httpx.URL(url), salt)
        except TimeoutError:
            why = f"{shown} took longer than {self._options.fetch_timeout:g} s"
        except (httpx.InvalidURL, UnicodeError) as error:
            why = "" if "@" in url else f": {error}"  # which may quote a part of it
            raise ImageError(
                f"{shown} is not a valid URL{why}", code="invalid_image_url"
            ) from error
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            why = f"{shown} cannot be fetched: {error or type(error).__name__}"
        finally:
            if trip.exchange is not None and not trip.exchange.done():
                trip.exchange.add_done_callback(lambda _: self._turns.leave(flight.ticket))
            else:
                self._turns.leave(flight.ticket)
        raise ImageError(why, code="image_unreachable")

    async def _begin(self, trip: _Trip) -> None:
        if trip.clock.when() is None:
            await self._turns.wait(trip.flight.ticket, PATIENCE * self._options.fetch_timeout)
            now = asyncio.get_running_loop().time()
            trip.clock.reschedule(now + self._options.fetch_timeout)

    async def _follow(self, trip: _Trip, url: httpx.URL, salt: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            answer = await self._cache.get(str(url), salt, HEADERS, partial(self._send, trip, url))
            if answer.status == 200:
                return answer.body
            if answer.status not in REDIRECTS or "location" not in answer.headers:
                raise ImageError(
                    f"{shown_url(str(url))} returned HTTP status {answer.status}",
                    code="image_unreachable",
                )
            url = _joined(url, answer.headers["location"])
        raise ImageError(
            f"the image's URL redirects more than {MAX_REDIRECTS} times", code="image_unreachable"
        )

    async def _send(self, trip: _Trip, url: httpx.URL, headers: hishel.Headers) -> HttpResponse:
        await self._begin(trip)
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        exchange = asyncio.create_task(self._exchange(trip.flight, url, headers, given_up))
        trip.exchange = exchange
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._end)
        try:
            return await asyncio.shield(exchange)
        finally:
            given_up.set_result(None)

    def _end(self, exchange: asyncio.Task[HttpResponse]) -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # mark the exception as retrieved: the requester may have left

    async def _exchange(
        self,
        flight: ByteFlight,
        url: httpx.URL,
        headers: hishel.Headers,
        given_up: asyncio.Future[None],
    ) -> HttpResponse:
        """Send a request to the server of `url`, and return its response. Run this in a task that
        is never cancelled.
        """
        GIVEN_UP.set(given_up)
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        sent = [
            (b"Host", url.netloc),
            *((name.encode(), value.encode("latin-1")) for name, value in headers.items()),
        ]
        async with self._pool.stream(
            "GET", target, headers=sent, extensions={"timeout": {"connect": CONNECT_TIMEOUT}}
        ) as response:
            fields: dict[str, list[str]] = {}
            for name, value in response.headers:
                fields.setdefault(name.decode("latin-1").lower(), []).append(
                    value.decode("latin-1")
                )
            length = fields.get("content-length", ["0"])[0]
            announced = int(length[:20]) if length.isascii() and length.isdigit() else 0
            self._inline.check_size(announced)
            flight.grow(announced)
            coding = ", ".join(fields.pop("content-encoding", [])) if response.status == 200 else ""
            decoder = ContentDecoder(coding, str(url)[:200])
            body, came = bytearray(), 0
            async for chunk in response.aiter_stream():
                came += len(chunk)
                self._inline.check_size(came)
                for piece in decoder.feed(chunk):
                    self._inline.check_size(len(body) + len(piece))
                    flight.grow(max(came, len(body) + len(piece)))
                    body += piece
                    if coding:
                        await asyncio.sleep(0)  # a chunk may decode to many megabytes
            decoder.check_end()
            if response.status == 200:
                self._metrics.inc("saccade_images_fetched_total")
            return HttpResponse(response.status, hishel.Headers(fields), bytes(body))

    def _check(self, url: httpx.URL) -> None:
        """Check that this URL is allowed, as far as that depends on the URL alone.

        Raises ImageError if it is not.
        """
        if url.scheme not in ("http", "https") or not url.host:
            raise ImageError(
                "the image's URL redirects to a URL that is not http or https",
                code="image_address_refused",
            )
        if url.port is not None and not 0 < url.port < 1 << 16:
            raise ImageError(
                f"{shown_url(str(url))} is not a valid URL: its port is not below 65536",
                code="invalid_image_url",
            )
        allowed = self._options.allowed_media_domains
        if allowed and not any(
            url.host == domain.lower() or url.host.endswith("." + domain.lower())
            for domain in allowed
        ):
            raise ImageError(
                f"images from {url.host!r} are not allowed; allowed hosts are "
                f"{', '.join(allowed)} (--allowed-media-domains)",
                code="image_address_refused",
            )

    # ---- file:

    async def _read_local(self, url: str, flight: ByteFlight) -> bytes:
        """Read a file in a thread.

        If the file's directory hangs, this blocks only requests for files, and at most the client's
        share of the threads.
        """
        seconds, in_thread = self._options.fetch_timeout, asyncio.get_running_loop().run_in_executor
        step: asyncio.Future[BinaryIO] | asyncio.Future[bytes] | None = None
        try:
            await self._disk_turns.wait(flight.ticket, PATIENCE * seconds)
            async with asyncio.timeout(seconds):
                step = opening = in_thread(self._readers, self._open_file, url)
                with await asyncio.shield(opening) as file:
                    flight.grow(os.fstat(file.fileno()).st_size)
                    rest = os.fdopen(os.dup(file.fileno()), "rb")  # the thread closes it
                step = reading = in_thread(self._readers, self._read_all, rest)
                return await asyncio.shield(reading)
        except TimeoutError:
            raise ImageError(
                f"{shown_url(url)} took longer than {seconds:g} s", code="image_unreachable"
            ) from None
        finally:
            if step is None or step.done():
                self._disk_turns.leave(flight.ticket)
            else:  # the thread's slot remains in use while it hangs
                step.add_done_callback(partial(self._end_late, flight))

    def _end_late(self, flight: ByteFlight, step: asyncio.Future[Any]) -> None:
        """Release the permit of a thread that returns after its fetch has ended."""
        self._disk_turns.leave(flight.ticket)
        if not step.cancelled() and step.exception() is None:
            found = step.result()
            if not isinstance(found, bytes):
                found.close()

    def _read_all(self, file: BinaryIO) -> bytes:
        with file:
            return file.read(self._max_bytes)

    def _open_file(self, url: str) -> BinaryIO:
        """Open a regular file below the allowed directory.

        Raises ImageError for any other file, and TooLarge beyond the limit of an image.
        """
        root = self._options.allowed_local_media_path
        if root is None:
            raise ImageError(
                "file: URLs are not allowed (--allowed-local-media-path allows a directory)",
                code="invalid_image_url",
            )
        refused = ImageError(
            f"{shown_url(url)} is not a readable file below the allowed folder",
            code="invalid_image_url",
        )
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise refused from error
        if parts.netloc not in ("", "localhost"):
            raise refused
        try:
            # Resolve links, and then check and open the resolved path, which must not contain a
            # link by then.
            path = Path(os.fsdecode(unquote_to_bytes(parts.path))).resolve(strict=True)
            if not path.is_relative_to(Path(root).resolve()):
                raise refused
            file = os.fdopen(
                os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb"
            )
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a cycle of links
            raise refused from error
        try:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise refused
            self._inline.check_size(found.st_size)
        except BaseException:
            file.close()
            raise
        return file


def _joined(url: httpx.URL, location: str) -> httpx.URL:
    try:
        return url.join(location)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ImageError(
            "the image's URL redirects to an invalid URL",
            code="invalid_image_url",
        ) from error
