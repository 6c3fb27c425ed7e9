"""The path of a picture through the front, in one object: fetch, digest, probe, and, only where
needed, decode.

    open:          URL -> bytes -> digest -> header -> key, size, tokens.       No decoding.
    hold:          a request that names the picture is in flight: keep its bytes.
    decode:        the engine asked for its pixels: into the slot that it named.
    call_off:      the engine needs them no more.
    release:       the request has ended.

Knows nothing of prompts, HTTP or the engine's messages.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import PIL.Image
from cachetools import LRUCache

from saccade.core.arena import Arena
from saccade.core.config import MIB
from saccade.core.errors import ImageError, InvalidRequest, NotFound, RequestError, TooLarge
from saccade.core.exchange import EmbeddingWanted
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions, RoleOptions
from saccade.core.plan import PixelSlot
from saccade.core.recipe import ImageRecipe
from saccade.core.types import Image, ImageKey
from saccade.media.content import (
    RAW_MAGIC,
    Budget,
    Probe,
    check_pixels,
    digest,
    encode_array,
    encode_image,
    identify,
    read_raw,
)
from saccade.media.decode_dedup import Decoders
from saccade.media.decode_queue import Job, check_memory
from saccade.media.encoders import Encoders
from saccade.media.fairness import Requester
from saccade.media.fetch import Fetcher
from saccade.media.files import FileStore
from saccade.media.flights import ByteFlight, Flights
from saccade.media.pool import DecodePool
from saccade.media.stock import Stocks
from saccade.media.uploads import Uploads

REMEMBERED_HEADERS = 1 << 16

INLINE_BYTES = 1 << 20
"""Bytes hashed on the event loop (0.2 ms); more go to a thread."""


REMEMBERED_NAMES = 1 << 16
"""Images that are known by a name that clients gave."""

LONG_URL = 1 << 13
"""Characters from which a URL is taken to hold the picture itself."""

DEFAULT_BUDGET = Budget()


@dataclass(frozen=True, slots=True)
class FileId:
    """An uploaded file."""

    id: str


@dataclass(frozen=True, slots=True)
class Base64:
    """An image's bytes, as text. An API that has them in a field of their own needs no URL around
    them, which would be a second copy.
    """

    text: str


@dataclass(frozen=True, slots=True)
class KnownImage:
    """An image that came before under a name of the client's."""

    uuid: str


Address = str | bytes | Base64 | FileId | KnownImage


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A picture as a request names it: a URL, an uploaded file, a name under which it came before,
    or encoded bytes where it enters behind the front.

    `param` is its place, for errors. `uuid`: the name under which it may come again.
    """

    url: Address
    param: str
    budget: Budget = DEFAULT_BUDGET
    uuid: str = ""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EncodedBytes:
    """A picture's bytes, held once however many requests name them. `digest` is their blake3."""

    data: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Read:
    """What reading one source brought. Times in ms; `begun` is `time.monotonic()`."""

    encoded: EncodedBytes
    probe: Probe
    fetch_ms: float
    digest_ms: float
    begun: float


@dataclass(frozen=True, slots=True, eq=False)
class OpenedImage:
    """A picture that was opened: what the engine is told (`image`), and what decoding it would
    take. Times in ms. `read` is `time.monotonic()` when its bytes began to be fetched.
    """

    image: Image
    probe: Probe
    recipe: ImageRecipe
    encoded: EncodedBytes
    asker: Requester
    fetch_ms: float
    digest_ms: float
    read: float
    budget: Budget = DEFAULT_BUDGET

    @property
    def data(self) -> bytes:
        return self.encoded.data


@dataclass(slots=True)
class Spent:
    """What the pixels and the embedding of a picture in flight have cost so far.

    `decoded` and `encoded` are `time.monotonic()` when an image worker, and the vision tower, were
    done with it. `encoder`: what came of asking another server for it ("" if none was asked), and
    `encoder_ms` what that took, its tower's `encode_ms` included.
    """

    decode_ms: float = 0.0
    encode_ms: float = 0.0
    decoded: float = 0.0
    encoded: float = 0.0
    encoder: str = ""
    encoder_ms: float = 0.0


class Media:
    """All pictures of one server.

    Everything runs on one event loop; `start` it there, and `close` it.
    """

    def __init__(
        self,
        spec: FamilySpec,
        options: MediaOptions,
        arena: Arena,
        metrics: Metrics,
        role: RoleOptions = RoleOptions(),  # noqa: B008 - frozen
        stocks: Stocks | None = None,
    ) -> None:
        """`stocks`: what image workers are forked from, where several share it."""
        self._spec = spec
        self._options = options
        self._arena = arena
        self._metrics = metrics
        self.encoders = Encoders(role, arena, metrics)
        self.files = Uploads(FileStore(options.files_folder, options.files_mb * MIB))
        self._fetcher = Fetcher(options, metrics)
        self._pool = DecodePool(arena, options, metrics, stocks)
        self._decoders = Decoders(self._pool, metrics)
        self._reads = Flights()
        self._encoded: WeakValueDictionary[bytes, EncodedBytes] = WeakValueDictionary()  # by digest
        self._probes: LRUCache[bytes, Probe] = LRUCache(REMEMBERED_HEADERS)
        self._known: LRUCache[tuple[str, str], tuple[bytes, Probe]] = LRUCache(REMEMBERED_NAMES)
        """By salt and uuid: digest and header."""
        self._held: dict[ImageKey, list[OpenedImage]] = {}
        self._spent: dict[ImageKey, Spent] = {}  # same keys

    def start(self) -> None:
        """Start the image workers in the background, where the model sees images."""
        if self._spec.sees_images:
            self._pool.start()

    async def close(self) -> None:
        await self.encoders.close()
        await self._decoders.close()
        await self._fetcher.close()
        await self._reads.close()
        self.files.close()

    async def open_all(
        self, sources: Sequence[ImageSource], salt: str, asker: Requester | None = None
    ) -> tuple[OpenedImage, ...]:
        """Open a request's pictures beside each other; what several of them name is read once.

        The first that fails ends the others. `client` is who takes turns with others; by default
        the salt. Raises as `open` does.
        """
        self.check_sources(sources)
        asker, reads = asker or Requester(salt), dict[Hashable, asyncio.Task[_Read]]()
        for source in sources:
            if (name := _name(source.url)) not in reads:
                reads[name] = asyncio.create_task(self._read(source.url, salt, asker))
        opening = [
            asyncio.create_task(self._identify(source, salt, asker, reads[_name(source.url)]))
            for source in sources
        ]
        try:
            return tuple(await asyncio.gather(*opening))
        finally:
            tasks = (*opening, *reads.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def check_sources(self, sources: Sequence[ImageSource]) -> None:
        """Raises InvalidRequest for images that a model without vision is sent, and for more of
        them than one request may have.
        """
        if sources:
            self._check_seen(sources[0].param)
        limit = self._options.max_images_per_request
        if len(sources) > limit:
            raise InvalidRequest(
                f"the request has {len(sources)} pictures; the limit is {limit}: send fewer, "
                "or start the server with a larger "
                "--max-images-per-request",
                param=sources[limit].param,
                code="too_many_images",
            )

    async def open(
        self, source: ImageSource, salt: str, asker: Requester | None = None
    ) -> OpenedImage:
        """Name a picture and say what it costs, without decoding it.

        Bytes that do not come with the request are counted in the asker's room before they are
        read. Raises ImageError (TooLarge, NotFound) with `param` set when it cannot be fetched, is
        no picture, or is beyond a limit; Overloaded where there is no room or no turn for it.
        """
        return (await self.open_all((source,), salt, asker))[0]

    async def _identify(
        self, source: ImageSource, salt: str, asker: Requester, reading: asyncio.Task[_Read]
    ) -> OpenedImage:
        try:
            read = await reading
            content = identify(read.encoded.digest, read.probe, source.budget, salt, self._spec)
            self._check_fits(content.recipe.canvas)
            check_memory(
                read.probe, len(read.encoded.data), content.recipe, self._options.decode_memory
            )
        except (ImageError, TooLarge, NotFound) as error:
            raise _at(error, source.param) from error
        if source.uuid:
            self._known[salt, source.uuid] = read.encoded.digest, read.probe
        return OpenedImage(
            content.image,
            read.probe,
            content.recipe,
            read.encoded,
            asker,
            read.fetch_ms,
            read.digest_ms,
            read.begun,
            source.budget,
        )

    async def _read(self, url: Address, salt: str, asker: Requester) -> _Read:
        """The bytes of a source, their digest, and their header."""
        if isinstance(url, KnownImage):
            return self._recall(url, salt)
        begun = time.monotonic()
        data = await self._bytes(url, salt, asker)
        fetched = time.monotonic()
        name = digest(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(digest, data)
        encoded = self._encoded.setdefault(name, EncodedBytes(data, name))
        found = await self._header(name, data, asker.request)
        done = time.monotonic()
        return _Read(encoded, found, (fetched - begun) * 1e3, (done - fetched) * 1e3, begun)

    def _recall(self, known: KnownImage, salt: str) -> _Read:
        """What is remembered of an image: its bytes only while a request holds them.

        Raises ImageError where nothing is.
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
        return _Read(encoded, probe, 0.0, 0.0, time.monotonic())

    async def _header(self, name: bytes, data: bytes, request: str) -> Probe:
        """What the header of these bytes says: read by an image worker, once. Raises ImageError."""
        if not data:
            raise ImageError("the picture is empty (0 bytes)")
        found = self._probes.get(name)
        if found is None:
            # Our own format, without a parser; its bytes may be many.
            raw = data.startswith(RAW_MAGIC)
            found = read_raw(data) if raw else await self._pool.read_header(name, data, request)
            check_pixels(found, self._options.max_image_pixels)
            self._probes[name] = found
        return found

    async def _bytes(
        self, url: str | bytes | Base64 | FileId, salt: str, asker: Requester
    ) -> bytes:
        match url:
            case bytes():
                return url
            case FileId(id):
                return await self._upload(id, asker)
            case Base64(text):
                return await self._fetcher.decode(text)
            case _:
                return await self._fetcher.fetch(url, salt, asker)

    async def _upload(self, id: str, asker: Requester) -> bytes:
        """The content of a file of the asker's own, from a request in flight that holds the same
        bytes if there is one.
        """
        stored = await self.files.find(id, asker.owner)
        if (held := self._encoded.get(stored.digest)) is not None:
            asker.room.reserve(len(held.data))
            return held.data

        async def read(flight: ByteFlight) -> bytes:
            flight.grow(stored.nbytes)
            return await self.files.read(id, asker.owner)

        return await self._reads.join(stored.digest, asker, read)

    async def check(self, data: bytes, param: str) -> None:
        """Whether a request could name these bytes as a picture.

        Raises InvalidRequest, ImageError or TooLarge with the reason why not.
        """
        self._check_seen(param)
        try:
            self._fetcher.check_size(len(data))
            name = await asyncio.to_thread(digest, data)
            await self._header(name, data, Requester().request)
        except (ImageError, TooLarge) as error:
            raise _at(error, param) from error

    def _check_seen(self, param: str) -> None:
        """Raises InvalidRequest where the model has no vision tower."""
        if not self._spec.sees_images:
            raise InvalidRequest(
                f"{param}: this model has no vision: it takes text only; send no images, or ask a "
                "model that has a vision tower",
                param,
                "no_vision",
            )

    def _check_fits(self, size: tuple[int, int]) -> None:
        """Raises ImageError.

        Pictures within the model's bound do fit; one that is rounded up to whole patches may pass
        it.
        """
        height, width = size
        if height * width * 3 > self._arena.size:
            raise ImageError(
                f"the picture is {width} x {height} px after resizing, "
                f"{height * width * 3 / 2**20:.0f} MiB; shared memory holds "
                f"{self._arena.size / 2**20:.0f} MiB: set a smaller max_pixels, or start the "
                "server with a larger --tune arena_mb=MIB",
                code="image_too_large",
            )

    # ---- requests in flight

    def hold(self, opened: OpenedImage) -> None:
        """A request in flight names this picture: its bytes stay until as many `release`s."""
        self._metrics.inc("saccade_images_received_total")
        self._held.setdefault(opened.image.key, []).append(opened)
        self._spent.setdefault(opened.image.key, Spent())

    def release(self, opened: OpenedImage) -> None:
        """The request has ended: one `hold` less."""
        key = opened.image.key
        self._held[key].remove(opened)
        if not self._held[key]:
            del self._held[key], self._spent[key]

    # ---- the engine's side

    async def bring(self, key: ImageKey, slot: PixelSlot) -> bool:
        """Bring a held image into its slot: as `decode`, unless an encoder gives its embedding.
        Whether it did. Raises as `decode` does.
        """
        opened = next(iter(self._held.get(key, ())), None)
        if opened is not None and self.encoders.fits(opened.image.num_tokens, slot):
            data = next((each.data for each in self._held[key] if each.data), b"")
            budget, tower = opened.budget, self.encoders.tower
            wanted = EmbeddingWanted(
                opened.image, tower, budget.detail, budget.min_pixels, budget.max_pixels
            )
            answer = await self.encoders.ask(wanted, data, slot)
            if spent := self._spent.get(key):
                spent.encoder, spent.encoder_ms = answer.outcome, answer.ms
            if answer.outcome == "embedding":
                return True
        await self.decode(key, slot)
        return False

    async def decode(self, key: ImageKey, slot: PixelSlot) -> None:
        """Decode a held image into its slot. When this ends, nothing writes there any more.

        Raises ImageError when the bytes cannot be decoded or no request in flight holds them,
        EngineUnavailable without image workers, CancelledError after `call_off`.
        """
        if key not in self._held:
            raise ImageError("the request that named this picture has ended")
        opened = next((each for each in self._held[key] if each.data), None)
        if opened is None:  # they came with an earlier request
            raise ImageError(
                "an image that is named by its uuid alone is not cached any more: send it with its "
                "URL or bytes",
                code="unknown_uuid",
            )
        assert (slot.height, slot.width) == opened.recipe.canvas
        asker = opened.asker
        job = Job(key.digest, opened.data, opened.probe, opened.recipe, asker.client, asker.request)
        await self._decoders.decode(key, job, slot)
        if spent := self._spent.get(key):
            spent.decode_ms, spent.decoded = job.ms, time.monotonic()

    def call_off(self, key: ImageKey) -> None:
        """Nobody needs an image that is being decoded: `decode` ends."""
        self.encoders.call_off(key)
        self._decoders.call_off(key)

    def encoded(self, key: ImageKey, ms: float, at: float) -> None:
        """The engine has encoded a picture, which took `ms` and ended `at`."""
        if spent := self._spent.get(key):
            spent.encode_ms, spent.encoded = ms, at

    @property
    def held(self) -> int:
        """Pictures of requests in flight."""
        return len(self._held)

    def spent(self, key: ImageKey) -> Spent:
        """What a picture has cost for those who hold it."""
        return self._spent.get(key) or Spent()

    def holds(self, nbytes: int) -> bool:
        """Whether shared memory is as large."""
        return nbytes <= self._arena.size

    def embedding(self, offset: int, nbytes: int) -> memoryview:
        """What the engine has put into the arena to be sent."""
        return self._arena.flat(offset, nbytes)


def source_from_object(image: object, param: str) -> ImageSource:
    """A picture that enters behind the front: encoded bytes, a Pillow image, a uint8 array [height,
    width, 3], or a path.

    Raises ImageError when it is none of these, or a file that cannot be read.
    """
    match image:
        case bytes():
            return ImageSource(image, param)
        case PIL.Image.Image():
            return ImageSource(encode_image(image), param)
        case np.ndarray():
            return ImageSource(encode_array(image), param)
        case os.PathLike():
            try:
                return ImageSource(Path(image).read_bytes(), param)
            except OSError as error:
                raise ImageError(
                    f"{os.fspath(image)} cannot be read: {error.strerror}", param
                ) from error
    raise ImageError(
        "a picture must be bytes, a PIL image, a uint8 array or a path, not "
        f"{type(image).__name__}",
        param,
    )


def _name(url: Address) -> Hashable:
    """What two sources have in common that name the same bytes. Bytes that are there already, and
    texts that hold them, are compared by their digests later: that costs less.
    """
    if isinstance(url, FileId | KnownImage):
        return url
    if len(url.text if isinstance(url, Base64) else url) < LONG_URL:
        return url
    return id(url)


def _at(error: RequestError, param: str) -> RequestError:
    """The same error at this request's place: one error of a shared fetch may reach several
    requests.
    """
    return type(error)(error.message, error.param or param, error.code)
