"""A picture's bytes from wherever its URL says: `data:`, `http(s):`, or `file:` below one allowed
folder.

Owns limits (bytes, seconds, redirects, hosts) and the single flight per URL. Which addresses may be
connected to is `address.py`'s policy; `http_cache.py` keeps what servers allow to be kept.
Redirects are followed by hand, so that every hop passes the same checks. Knows nothing of what the
bytes mean.
"""

from __future__ import annotations

import asyncio
import os
import stat
from functools import partial
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import hishel
import httpcore
import httpx
import pybase64

from saccade.core.errors import ImageError, TooLarge
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions
from saccade.media.address import PinnedNetwork, Resolve, resolve
from saccade.media.http_cache import Answer, HTTPCache

MAX_REDIRECTS = 5
MAX_FETCHES = 64
"""Fetches that run beside each other; more wait their turn, within their own timeout."""
CONNECT_TIMEOUT = 5.0
REDIRECTS = {301, 302, 303, 307, 308}
HEADERS = hishel.Headers(
    {"User-Agent": "saccade", "Accept": "image/*, */*;q=0.1", "Accept-Encoding": "identity"}
)
CACHE_BYTES = 256 << 20
"""Encoded pictures kept where their servers allow it."""

INLINE_CHARACTERS = 1 << 20
"""Base64 text decoded on the event loop (0.2 ms); more goes to a thread."""


class Fetcher:
    """Fetches for one server. `close` ends its connections."""

    def __init__(self, options: MediaOptions, metrics: Metrics, resolve: Resolve = resolve) -> None:
        self._options = options
        self._metrics = metrics
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            max_connections=MAX_FETCHES,
            keepalive_expiry=30.0,
            network_backend=PinnedNetwork(options.allow_private_media, resolve),
        )
        self._cache = HTTPCache(CACHE_BYTES)
        self._flights: dict[tuple[str, str], asyncio.Task[bytes]] = {}
        self._askers: dict[asyncio.Task[bytes], int] = {}

    async def fetch(self, url: str, salt: str) -> bytes:
        """The encoded bytes.

        Raises ImageError when they cannot or must not be had, TooLarge beyond --max-image-bytes.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await self._decode_data_url(url)
        if scheme in ("http", "https"):
            return await self._join_flight(url, salt)
        if scheme == "file":
            return await asyncio.to_thread(self._read_file, url)
        raise ImageError(
            "a picture's URL must start with data:, https:, http: or file:",
            code="invalid_image_url",
        )

    async def close(self) -> None:
        for task in list(self._askers):
            task.cancel()
        await asyncio.gather(*self._askers, return_exceptions=True)
        await self._pool.aclose()

    # ---- data:

    async def _decode_data_url(self, url: str) -> bytes:
        comma = url.find(",", 0, 512)
        if comma < 0:
            raise ImageError(
                "the data: URL has no comma between its type and its data", code="invalid_image_url"
            )
        if not url[:comma].lower().endswith(";base64"):
            raise ImageError(
                "the data: URL is not in base64; write data:image/png;base64,...",
                code="invalid_image_url",
            )
        self.check_size((len(url) - comma - 1) * 3 // 4)
        if len(url) <= INLINE_CHARACTERS:
            return _decode_base64(url, comma + 1)
        return await asyncio.to_thread(_decode_base64, url, comma + 1)

    # ---- http: and https:

    async def _join_flight(self, url: str, salt: str) -> bytes:
        """One fetch per URL and tenant in flight.

        It ends early only when the last who asked has gone.
        """
        flight = self._flights.get((url, salt))
        if flight is None:
            flight = asyncio.create_task(self._fetch_http(url, salt))
            self._flights[url, salt] = flight
            self._askers[flight] = 0
        self._askers[flight] += 1
        try:
            return await asyncio.shield(flight)
        finally:
            self._askers[flight] -= 1
            if not self._askers[flight]:
                del self._askers[flight]
                del self._flights[url, salt]
                flight.cancel()

    async def _fetch_http(self, url: str, salt: str) -> bytes:
        shown = url[:200]
        try:
            async with asyncio.timeout(self._options.fetch_timeout):
                return await self._follow(httpx.URL(url), salt)
        except TimeoutError:
            why = f"{shown} took longer than {self._options.fetch_timeout:g} s"
        except httpx.InvalidURL as error:
            raise ImageError(
                f"{shown} is not a valid URL: {error}", code="invalid_image_url"
            ) from error
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            why = f"{shown} cannot be fetched: {error or type(error).__name__}"
        raise ImageError(why, code="image_unreachable")

    async def _follow(self, url: httpx.URL, salt: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            answer = await self._cache.get(str(url), salt, HEADERS, partial(self._send, url))
            if answer.status == 200:
                return answer.body
            if answer.status not in REDIRECTS or "location" not in answer.headers:
                raise ImageError(
                    f"{str(url)[:200]} answers {answer.status}", code="image_unreachable"
                )
            url = url.join(answer.headers["location"])
        raise ImageError(
            f"the picture's URL redirects more than {MAX_REDIRECTS} times", code="image_unreachable"
        )

    async def _send(self, url: httpx.URL, headers: hishel.Headers) -> Answer:
        timeouts = {
            "connect": CONNECT_TIMEOUT,
            "read": self._options.fetch_timeout,
            "write": CONNECT_TIMEOUT,
        }
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        sent = [
            (b"Host", url.netloc),
            *((name.encode(), value.encode("latin-1")) for name, value in headers.items()),
        ]
        async with self._pool.stream(
            "GET", target, headers=sent, extensions={"timeout": timeouts}
        ) as response:
            fields: dict[str, list[str]] = {}
            for name, value in response.headers:
                fields.setdefault(name.decode("latin-1").lower(), []).append(
                    value.decode("latin-1")
                )
            length = fields.get("content-length", ["0"])[0]
            self.check_size(int(length) if length.isdigit() else 0)
            body = bytearray()
            async for chunk in response.aiter_stream():
                body += chunk
                self.check_size(len(body))
            if response.status == 200:
                self._metrics.inc("saccade_images_fetched_total")
            return Answer(response.status, hishel.Headers(fields), bytes(body))

    def _check(self, url: httpx.URL) -> None:
        """Whether this hop may be taken, as far as the URL itself tells."""
        if url.scheme not in ("http", "https") or not url.host:
            raise ImageError(
                "the picture's URL redirects to something that is not http or https",
                code="image_address_refused",
            )
        if url.port is not None and not 0 < url.port < 1 << 16:
            raise ImageError(
                f"{str(url)[:200]} is not a valid URL: its port is not below 65536",
                code="invalid_image_url",
            )
        allowed = self._options.allowed_media_domains
        if allowed and not any(
            url.host == domain.lower() or url.host.endswith("." + domain.lower())
            for domain in allowed
        ):
            raise ImageError(
                f"pictures from {url.host!r} are not allowed here; allowed are "
                f"{', '.join(allowed)} (--allowed-media-domains)",
                code="image_address_refused",
            )

    # ---- file:

    def _read_file(self, url: str) -> bytes:
        root = self._options.allowed_local_media_path
        if root is None:
            raise ImageError(
                "file: URLs are not allowed here (--allowed-local-media-path names a folder to "
                "allow)",
                code="invalid_image_url",
            )
        parts = urlsplit(url)
        refused = ImageError(
            f"{url[:200]} is no readable file below the allowed folder", code="invalid_image_url"
        )
        if parts.netloc not in ("", "localhost"):
            raise refused
        try:
            # Checked after links are resolved; what is opened is the resolved path, and no link may
            # have taken its place.
            path = Path(os.fsdecode(unquote_to_bytes(parts.path))).resolve(strict=True)
            if not path.is_relative_to(Path(root).resolve()):
                raise refused
            with os.fdopen(
                os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb"
            ) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise refused
                self.check_size(found.st_size)
                return file.read()
        except (OSError, ValueError) as error:
            raise refused from error

    def check_size(self, size: int) -> None:
        limit = self._options.max_image_bytes
        if size > limit:
            raise TooLarge(
                f"the picture is over {limit / 1e6:.0f} MB encoded; compress it, or start the "
                "server with a larger --max-image-bytes",
                code="image_too_large",
            )


def _decode_base64(url: str, start: int) -> bytes:
    data = url[start:]
    if any(
        space in data for space in " \n\r\t\f"
    ):  # `base64 FILE` prints lines, and browsers read them
        data = "".join(data.split())
    data += "=" * (-len(data) % 4)  # some clients leave the padding out
    url_safe = b"-_" if "-" in data or "_" in data else None
    try:
        return pybase64.b64decode(data, altchars=url_safe, validate=True)
    except ValueError as error:
        raise ImageError(
            f"the data: URL is not valid base64: {error}", code="invalid_image_url"
        ) from error
