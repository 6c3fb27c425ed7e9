"""The bytes behind sources: fetched, named by their digest, held once, their headers read once.

    SourceReader   for all requests of a server
    Reads          the reads of one request: a source named several times is read once

Knows nothing of what a kind of media makes of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from cachetools import LRUCache

from saccade.core.errors import ImageError
from saccade.media.content import RAW_MAGIC, Probe, digest, read_raw
from saccade.media.opened import EncodedBytes, ReadTimes
from saccade.media.seen import SeenFiles
from saccade.media.sources.fairness import Requester
from saccade.media.sources.fetch import Fetcher
from saccade.media.sources.flights import ByteFlight, Flights
from saccade.media.sources.source import (
    Address,
    Base64,
    Digest,
    DrawnPage,
    FileId,
    KnownImage,
    name_of,
)
from saccade.media.sources.uploads import Uploads
from saccade.media.workers.pool import DecodePool

INLINE_BYTES = 1 << 20
"""Bytes hashed on the event loop (0.2 ms); more go to a thread."""
FRAMES_A_TURN = 32
"""Frames of a video that are read before others get their turn."""
UNKNOWN = "unknown_digest"
"""The code for a digest of bytes that the asker has not sent, whoever else has."""
REMEMBERED_NAMES = 1 << 16
"""Images that are known by a name that clients gave."""


@dataclass(frozen=True, slots=True)
class SourceRead:
    """The outcome of reading one source."""

    encoded: EncodedBytes
    probe: Probe
    times: ReadTimes


@dataclass(frozen=True, slots=True)
class Fetched:
    """Bytes, and when the first and the last of them came (`time.monotonic()`)."""

    encoded: EncodedBytes
    begun: float
    fetched: float

    def with_header(self, probe: Probe, ended: float) -> SourceRead:
        """Make the outcome, with a header that was there at `ended`."""
        fetch_ms, digest_ms = (self.fetched - self.begun) * 1e3, (ended - self.fetched) * 1e3
        return SourceRead(self.encoded, probe, ReadTimes(fetch_ms, digest_ms, self.begun))


R = TypeVar("R", SourceRead, Fetched)


class SourceReader:
    """All sources of one server. fetcher, files: where bytes come from. seen, pool: headers."""

    def __init__(self, fetcher: Fetcher, files: Uploads, seen: SeenFiles, pool: DecodePool) -> None:
        self._fetcher = fetcher
        self._files = files
        self._seen = seen
        self._pool = pool
        self._uploads = Flights()
        self._encoded: WeakValueDictionary[bytes, EncodedBytes] = WeakValueDictionary()  # by digest
        self._known: LRUCache[tuple[str, str], tuple[bytes, Probe]] = LRUCache(REMEMBERED_NAMES)
        """By salt and uuid: digest and header."""

    async def close(self) -> None:
        await self._fetcher.close()
        await self._uploads.close()

    async def read_source(
        self, url: Address, salt: str, asker: Requester, video: bool = False
    ) -> SourceRead:
        """Read a source's bytes, their digest, and their header.

        Raises ImageError, NotFound, TooLarge. Raises Overloaded if the budget is used up or the
        wait for a turn is too long.
        """
        if isinstance(url, KnownImage):
            return self._recall(url, salt)
        if isinstance(url, DrawnPage):
            return SourceRead(
                self.held_page(url.encoded), url.probe, ReadTimes(0.0, 0.0, url.begun)
            )
        return await self.with_header(await self.fetch(url, salt, asker), asker, video)

    async def fetch(self, url: Address, salt: str, asker: Requester) -> Fetched:
        """Read a source's bytes and their digest. Raises as `read`."""
        begun = time.monotonic()
        data = await self._bytes(url, salt, asker)
        fetched = time.monotonic()
        return Fetched(await self.named(data), begun, fetched)

    async def with_header(
        self, found: Fetched, asker: Requester, video: bool = False
    ) -> SourceRead:
        """Read the header of fetched bytes. Raises ImageError."""
        probe = await self.header(found.encoded.digest, found.encoded.data, asker, video)
        return found.with_header(probe, time.monotonic())

    def seen(self, found: Fetched, asker: Requester) -> SourceRead | None:
        """Return fetched bytes with their header, if an image with these bytes was seen."""
        probe = self._seen.get(found.encoded.digest, asker.tenant)
        return None if probe is None else found.with_header(probe, found.fetched)

    async def named(self, data: bytes) -> EncodedBytes:
        """Return bytes under their digest, held once."""
        name = digest(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(digest, data)
        return self._encoded.setdefault(name, EncodedBytes(data, name))

    def held_page(self, page: EncodedBytes) -> EncodedBytes:
        """Return a page with the bytes that a request in flight holds, if any."""
        return self._encoded.setdefault(page.digest, page) if page.data else page

    async def header(
        self, name: bytes, data: bytes, asker: Requester, video: bool = False
    ) -> Probe:
        """Return the header of these bytes, read once by an image worker. Raises ImageError."""
        if not data:
            raise ImageError(f"the {'video' if video else 'image'} is empty (0 bytes)")
        found = await self._seen.find(name, video, asker.tenant)
        if found is None:
            if video:
                found = await self._pool.video_headers.read_header(name, data, asker)
            elif data.startswith(RAW_MAGIC):  # our own format, without a parser
                found = read_raw(data)
            else:
                found = await self._pool.headers.read_header(name, data, asker)
            self._seen.put(name, video, asker.tenant, found)
        return found

    def remember(self, salt: str, uuid: str, read: SourceRead) -> None:
        """Remember an image under the client's name for it."""
        self._known[salt, uuid] = read.encoded.digest, read.probe

    def _recall(self, known: KnownImage, salt: str) -> SourceRead:
        """Return the remembered facts of an image. Its bytes are there only while a request holds
        it.

        Raises ImageError for an unknown image.
        """
        found = self._known.get((salt, known.uuid))
        if found is None:
            raise ImageError(
                f"no image has come with the uuid {known.uuid!r}, or too many since: send it with "
                "its URL or bytes",
                code="unknown_uuid",
            )
        name, probe = found
        encoded = self._encoded.get(name) or EncodedBytes(b"", name)
        return SourceRead(encoded, probe, ReadTimes(0.0, 0.0, time.monotonic()))

    async def _bytes(self, url: Address, salt: str, asker: Requester) -> bytes:
        assert not isinstance(url, KnownImage | DrawnPage), "these are not fetched"
        match url:
            case bytes():
                return url
            case FileId(id):
                return await self._upload(id, asker)
            case Digest(name):
                return await self._sent(name, asker)
            case Base64(text):
                return await self._fetcher.decode(text)
            case _:
                return await self._fetcher.fetch(url, salt, asker)

    async def _sent(self, name: str, asker: Requester) -> bytes:
        """Return the bytes that the asker's tenant has sent, by their digest. Raises ImageError."""
        if (data := asker.budget.sent(asker.tenant, name)) is not None:
            asker.budget.reserve(len(data))
            return data
        id = await self._files.find_content(name, asker.owner)
        if id is not None:
            return await self._upload(id, asker)
        raise ImageError(
            f"you have sent no image with the digest {name}, or it is no longer kept: send its "
            "bytes, or upload it with /v1/files",
            code=UNKNOWN,
        )

    async def _upload(self, id: str, asker: Requester) -> bytes:
        """Return the content of one of the asker's files. A request in flight with the same bytes
        lends them.
        """
        stored = await self._files.find(id, asker.owner)
        if (held := self._encoded.get(stored.digest)) is not None:
            asker.budget.reserve(len(held.data))
            return held.data

        async def read(flight: ByteFlight) -> bytes:
            flight.grow(stored.nbytes)
            return await self._files.read(id, asker.owner)

        return await self._uploads.join(stored.digest, asker, read)


class Reads:
    """The reads of one request, which take turns as the asker's. salt: for the images' names."""

    def __init__(self, reader: SourceReader, salt: str, asker: Requester) -> None:
        self.reader = reader
        self.salt = salt
        self.asker = asker
        self._read: dict[tuple[Hashable, bool], asyncio.Task[SourceRead]] = {}
        self._fetched: dict[Hashable, asyncio.Task[Fetched]] = {}
        self._named: dict[bytes, str] = {}
        """By the digest of bytes that were read, their name in SHA-256."""

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """Yield the reads that have begun."""
        yield from self._read.values()
        yield from self._fetched.values()

    def read_source(self, url: Address, video: bool = False) -> asyncio.Task[SourceRead]:
        """Read a source and its header."""
        name = name_of(url), video
        if (task := self._read.get(name)) is None:
            reading = self.reader.read_source(url, self.salt, self.asker, video)
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
        """Return held bytes, or else those that came with this request. Raises as `reading`."""
        try:
            return await reading
        except ImageError as error:
            if error.code == UNKNOWN:
                found = await self._brought(url.name, brought())
                if found is not None:
                    return found
            raise

    async def _brought(self, name: str, others: list[asyncio.Task[R]]) -> R | None:
        """Return the source of this request whose bytes have a digest, if any."""
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
        """Read a source without its header."""
        name = name_of(url)
        if (task := self._fetched.get(name)) is None:
            fetching = self.reader.fetch(url, self.salt, self.asker)
            if isinstance(url, Digest):
                fetching = self._or_brought(url, fetching, self._fetched_along)
            task = self._fetched[name] = asyncio.create_task(fetching)
        return task

    async def frames(self, urls: Sequence[Address]) -> list[SourceRead]:
        """Read the frames of a video that come as images. Other requests get a turn every few
        frames. Headers of new frames are read concurrently.
        """
        reader, asker = self.reader, self.asker
        found: dict[Hashable, SourceRead | asyncio.Task[SourceRead]] = {}
        try:
            for number, url in enumerate(urls):
                if (name := name_of(url)) in found or (name, False) in self._read:
                    continue
                fetched = await reader.fetch(url, self.salt, asker)
                found[name] = reader.seen(fetched, asker) or asyncio.create_task(
                    reader.with_header(fetched, asker)
                )
                if number % FRAMES_A_TURN == FRAMES_A_TURN - 1:
                    await asyncio.sleep(0)
            each = [found.get(name_of(url)) or self._read[name_of(url), False] for url in urls]
            return [one if isinstance(one, SourceRead) else await one for one in each]
        finally:
            for task in found.values():
                if not isinstance(task, SourceRead):
                    task.cancel()
