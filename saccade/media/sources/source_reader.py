"""Reads sources: fetches the bytes, hashes them, and reads their header. Equal bytes are stored and
parsed once.

SourceReader   reads sources for all requests of a server
Reads          reads the sources of one request, each only once
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from cachetools import LRUCache

from saccade.core.errors import ImageError, NotFound
from saccade.core.metrics import Metrics
from saccade.core.options import ServeOptions
from saccade.media.content import RAW_MAGIC, Probe, digest, read_raw
from saccade.media.file_cache import FileCache
from saccade.media.opened import EncodedBytes, ReadTimes
from saccade.media.sources.fairness import Requester
from saccade.media.sources.inline import InlineBytes
from saccade.media.sources.single_flight import ByteFlight, SingleFlight
from saccade.media.sources.source import (
    Address,
    Base64,
    Digest,
    FileId,
    KnownImage,
    RenderedPage,
    name_of,
)
from saccade.media.workers.pool import DecodePool
from saccade.plugins import provided

if TYPE_CHECKING:
    from saccade.media.sources.uploaded import UploadedFiles

INLINE_BYTES = 1 << 20
"""Up to this many bytes are hashed on the event loop (0.2 ms), more on a thread."""
FRAMES_A_TURN = 32
"""The number of a video's frames that are read before yielding to the event loop."""
UNKNOWN = "unknown_digest"
"""The error code for a digest of bytes that this tenant has not sent, even if another one has."""
REMEMBERED_NAMES = 1 << 16
"""The maximum number of images that clients can refer to by their `uuid`."""


@dataclass(frozen=True, slots=True)
class SourceRead:
    """What was read from a source: its bytes, its header, and how long it took."""

    encoded: EncodedBytes
    probe: Probe
    times: ReadTimes


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes of a source. Times are from `time.monotonic()`."""

    encoded: EncodedBytes
    begun: float  # when the read started
    fetched: float  # when all bytes had arrived

    def with_header(self, probe: Probe, ended: float) -> SourceRead:
        """Return the result of the read.

        probe: the header.
        ended: when the header was available.
        """
        fetch_ms, digest_ms = (self.fetched - self.begun) * 1e3, (ended - self.fetched) * 1e3
        return SourceRead(self.encoded, probe, ReadTimes(fetch_ms, digest_ms, self.begun))


R = TypeVar("R", SourceRead, Fetched)
T = TypeVar("T")


class UrlReader(Protocol):
    """Downloads URLs. A plugin provides it (`plugin.Requests.fetcher`)."""

    async def fetch(self, url: str, salt: str, asker: Requester) -> bytes:
        """Return the bytes at `url`. Raises ImageError if they are missing, forbidden or too
        large.
        """
        ...

    async def close(self) -> None: ...


class SourceReader:
    """Reads the sources of all requests.

    Headers come from the cache `seen`, or are read by `pool`. The code for URLs and for uploaded
    files is imported when it is first needed. The constructor raises ConfigError if several plugins
    provide it.
    """

    def __init__(
        self, options: ServeOptions, metrics: Metrics, seen: FileCache, pool: DecodePool
    ) -> None:
        self._options = options
        self._metrics = metrics
        self.inline = InlineBytes(options.media.max_image_bytes)
        self._fetcher: UrlReader | None = None
        self._build_fetcher = provided(lambda plugin: plugin.requests.fetcher)
        self._files: UploadedFiles | None = None
        self._build_files = provided(lambda plugin: plugin.requests.uploads)
        self._seen = seen
        self._pool = pool
        self._uploads = SingleFlight()
        self._encoded: WeakValueDictionary[bytes, EncodedBytes] = WeakValueDictionary()  # by digest
        self._known: LRUCache[tuple[str, str], tuple[bytes, Probe]] = LRUCache(REMEMBERED_NAMES)
        """Digest and header of images, by salt and uuid."""

    async def close(self) -> None:
        if self._fetcher is not None:
            await self._fetcher.close()
        await self._uploads.close()
        if self._files is not None:
            self._files.close()

    @property
    def fetcher(self) -> UrlReader:
        """The object that downloads URLs. Raises ImageError if no plugin provides one."""
        if self._fetcher is None:
            if self._build_fetcher is None:
                raise ImageError(
                    "this server does not fetch URLs: send the image's bytes as a data: URL",
                    code="invalid_image_url",
                )
            self._fetcher = resolve_name(self._build_fetcher)(self._options, self._metrics)
        return self._fetcher

    @property
    def files(self) -> UploadedFiles:
        """The files that clients have uploaded. Raises NotFound if no plugin stores files."""
        if self._files is None:
            if self._build_files is None:
                raise NotFound("this server does not store files: send the bytes as a data: URL")
            self._files = resolve_name(self._build_files)(self._options)
        return self._files

    async def read_source(
        self, url: Address, salt: str, requester: Requester, video: bool = False
    ) -> SourceRead:
        """Return a source's bytes, their digest, and their header.

        Raises ImageError, NotFound, TooLarge. Raises Overloaded if the budget is used up or the
        request has waited too long in a queue.
        """
        if isinstance(url, KnownImage):
            return self._recall(url, salt)
        if isinstance(url, RenderedPage):
            return SourceRead(
                self.held_page(url.encoded), url.probe, ReadTimes(0.0, 0.0, url.begun)
            )
        return await self.with_header(await self.fetch(url, salt, requester), requester, video)

    async def fetch(self, url: Address, salt: str, requester: Requester) -> Fetched:
        """Return a source's bytes and their digest.

        Raises ImageError, NotFound or TooLarge, and Overloaded if the budget is used up or the
        request has waited too long in a queue.
        """
        begun = time.monotonic()
        data = await self._bytes(url, salt, requester)
        fetched = time.monotonic()
        return Fetched(await self.named(data), begun, fetched)

    async def with_header(
        self, found: Fetched, requester: Requester, video: bool = False
    ) -> SourceRead:
        """Read the header of fetched bytes, and return both. Raises ImageError."""
        probe = await self.header(found.encoded.digest, found.encoded.data, requester, video)
        return found.with_header(probe, time.monotonic())

    def seen(self, found: Fetched, requester: Requester) -> SourceRead | None:
        """Return fetched bytes with their header if the header of this image is cached, else
        None.
        """
        probe = self._seen.get(found.encoded.digest, requester.tenant)
        return None if probe is None else found.with_header(probe, found.fetched)

    async def named(self, data: bytes) -> EncodedBytes:
        """Return `data` with its hash. Equal bytes that are still in use share one
        `EncodedBytes`.
        """
        name = digest(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(digest, data)
        return self._encoded.setdefault(name, EncodedBytes(data, name))

    def is_known(self, name: bytes, tenant: str) -> bool:
        """Return True if a request in flight has these bytes, or the tenant has sent them before.

        name: the blake3 hash of the bytes.
        """
        return name in self._encoded or self._seen.get(name, tenant) is not None

    def held_page(self, page: EncodedBytes) -> EncodedBytes:
        """Return the `EncodedBytes` of an equal page that a request in flight uses, or `page`
        itself.
        """
        return self._encoded.setdefault(page.digest, page) if page.data else page

    async def header(
        self, name: bytes, data: bytes, requester: Requester, video: bool = False
    ) -> Probe:
        """Return the header of these bytes, from the cache or read by an image worker.

        Raises ImageError.
        """
        if not data:
            raise ImageError(f"the {'video' if video else 'image'} is empty (0 bytes)")
        found = await self._seen.find(name, video, requester.tenant)
        if found is None:
            if video:
                found = await self._pool.video_headers.read_header(name, data, requester)
            elif data.startswith(RAW_MAGIC):  # Saccade's own format needs no image parser
                found = read_raw(data)
            else:
                found = await self._pool.headers.read_header(name, data, requester)
            self._seen.put(name, video, requester.tenant, found)
        return found

    def remember(self, salt: str, uuid: str, read: SourceRead) -> None:
        """Store an image's header under the `uuid` that the client chose."""
        self._known[salt, uuid] = read.encoded.digest, read.probe

    def _recall(self, known: KnownImage, salt: str) -> SourceRead:
        """Return the stored header of an image.

        The bytes are empty unless a request in flight holds them. Raises ImageError if no image is
        stored under this uuid.
        """
        found = self._known.get((salt, known.uuid))
        if found is None:
            raise ImageError(
                f"no image with the uuid {known.uuid!r} is cached: send it with its URL or bytes",
                code="unknown_uuid",
            )
        name, probe = found
        encoded = self._encoded.get(name) or EncodedBytes(b"", name)
        return SourceRead(encoded, probe, ReadTimes(0.0, 0.0, time.monotonic()))

    async def _bytes(self, url: Address, salt: str, requester: Requester) -> bytes:
        assert not isinstance(url, KnownImage | RenderedPage), "these are not fetched"
        match url:
            case bytes():
                return url
            case FileId(id):
                return await self._upload(id, requester)
            case Digest(name):
                return await self._sent(name, requester)
            case Base64(text):
                return await self.inline.decode(text)
            case _ if url[:5].lower() == "data:":
                return await self.inline.decode_url(url)
            case _:
                return await self.fetcher.fetch(url, salt, requester)

    async def _sent(self, name: str, requester: Requester) -> bytes:
        """Return bytes that the requester's tenant has sent before, by their digest.

        Raises ImageError.
        """
        if (data := requester.budget.sent(requester.tenant, name)) is not None:
            requester.budget.reserve(len(data))
            return data
        id = None
        with suppress(NotFound):  # no server without the plugin for files has any
            id = await self.files.find_content(name, requester.owner)
        if id is not None:
            return await self._upload(id, requester)
        raise ImageError(
            f"you have sent no image with the digest {name}, or it is no longer stored: send its "
            "bytes, or upload it with /v1/files",
            code=UNKNOWN,
        )

    async def _upload(self, id: str, requester: Requester) -> bytes:
        """Return the content of a file that the requester has uploaded.

        It is read only if no request in flight has the same bytes in memory.
        """
        stored = await self.files.find(id, requester.owner)
        if (held := self._encoded.get(stored.digest)) is not None:
            requester.budget.reserve(len(held.data))
            return held.data

        async def read(flight: ByteFlight) -> bytes:
            flight.grow(stored.nbytes)
            return await self.files.read(id, requester.owner)

        return await self._uploads.join(stored.digest, requester, read)


class Reads:
    """Starts and shares the reads of one request.

    salt: part of the images' keys.
    requester: identifies the request in the fair queues.
    """

    def __init__(self, reader: SourceReader, salt: str, requester: Requester) -> None:
        self.reader = reader
        self.salt = salt
        self.requester = requester
        self._read: dict[tuple[Hashable, bool], asyncio.Task[SourceRead]] = {}
        self._fetched: dict[Hashable, asyncio.Task[Fetched]] = {}
        self._named: dict[bytes, str] = {}
        """SHA-256 names ("sha256-HEX") of bytes that were read, by their blake3 digest."""

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """Yield the tasks of all reads that were started."""
        yield from self._read.values()
        yield from self._fetched.values()

    def read_source(self, url: Address, video: bool = False) -> asyncio.Task[SourceRead]:
        """Return the task that reads a source and its header. It is started unless it was
        before.
        """
        name = name_of(url), video
        if (task := self._read.get(name)) is None:
            reading = self.reader.read_source(url, self.salt, self.requester, video)
            if isinstance(url, Digest):
                reading = self._or_brought(url, reading, self._read_along)
            task = self._read[name] = asyncio.create_task(reading)
        return task

    def _read_along(self) -> list[asyncio.Task[SourceRead]]:
        return [task for (url, _), task in self._read.items() if not isinstance(url, Digest)]

    def _fetched_along(self) -> list[asyncio.Task[Fetched]]:
        return [task for url, task in self._fetched.items() if not isinstance(url, Digest)]

    async def _or_brought(
        self,
        url: Digest,
        reading: Coroutine[None, None, R],
        brought: Callable[[], list[asyncio.Task[R]]],
    ) -> R:
        """Return the result of `reading`, a read by digest.

        If the digest is unknown, use another source in the same request that has this digest, if
        there is one. Raises the errors of `reading`.
        """
        try:
            return await reading
        except ImageError as error:
            if error.code == UNKNOWN:
                found = await self._brought(url.name, brought())
                if found is not None:
                    return found
            raise

    async def _brought(self, name: str, others: list[asyncio.Task[R]]) -> R | None:
        """Wait for the other reads of the request. Return the one with the digest `name`, or
        None.
        """
        if others:
            await asyncio.wait(others)
        for task in others:
            if task.cancelled() or task.exception() is not None:
                continue
            read = task.result()
            if name == await self._name(read.encoded, name.partition("-")[0]):
                return read
        return None

    async def _name(self, encoded: EncodedBytes, kind: str) -> str:
        if kind == "blake3":
            return f"blake3-{encoded.digest.hex()}"
        if (name := self._named.get(encoded.digest)) is None:
            made = await asyncio.to_thread(hashlib.sha256, encoded.data)
            name = self._named[encoded.digest] = f"sha256-{made.hexdigest()}"
        return name

    def fetch(self, url: Address) -> asyncio.Task[Fetched]:
        """Return the task that reads a source without its header. It is started unless it was
        before.
        """
        name = name_of(url)
        if (task := self._fetched.get(name)) is None:
            fetching = self.reader.fetch(url, self.salt, self.requester)
            if isinstance(url, Digest):
                fetching = self._or_brought(url, fetching, self._fetched_along)
            task = self._fetched[name] = asyncio.create_task(fetching)
        return task

    async def frames(self, urls: Sequence[Address]) -> list[SourceRead]:
        """Read the frames of a video that the client sent as images, and return them.

        This yields to the event loop every few frames, and reads headers concurrently.
        """
        reader, requester = self.reader, self.requester
        found: dict[Hashable, SourceRead | asyncio.Task[SourceRead]] = {}
        try:
            for number, url in enumerate(urls):
                if (name := name_of(url)) in found or (name, False) in self._read:
                    continue
                fetched = await reader.fetch(url, self.salt, requester)
                found[name] = reader.seen(fetched, requester) or asyncio.create_task(
                    reader.with_header(fetched, requester)
                )
                if number % FRAMES_A_TURN == FRAMES_A_TURN - 1:
                    await asyncio.sleep(0)
            each = [found.get(name_of(url)) or self._read[name_of(url), False] for url in urls]
            return [one if isinstance(one, SourceRead) else await one for one in each]
        finally:
            for task in found.values():
                if not isinstance(task, SourceRead):
                    task.cancel()


async def all_of(opening: Sequence[asyncio.Task[T]], reads: Iterable[asyncio.Task[Any]]) -> list[T]:
    """Return the results of all `opening` tasks. The first error cancels the others, and
    `reads`.
    """
    try:
        return await asyncio.gather(*opening)
    finally:
        tasks = (*opening, *reads)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
