"""The path of an image through the front, in one object: fetch, digest, probe, and, only where
needed, decode.

    open:          URL -> bytes -> digest -> header -> key, size, tokens.       No decoding.
    hold:          a request in flight names the image: keep the bytes.
    decode:        the engine asked for the pixels: into the slot it named.
    call_off:      the engine needs no pixels any more.
    release:       the request has ended.

Knows nothing of prompts, HTTP or the engine's messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

from cachetools import LRUCache

from saccade.core.arena import Arena
from saccade.core.client import ANYBODY, Client
from saccade.core.config import MIB
from saccade.core.errors import ImageError, InvalidRequest, NotFound, TooLarge
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions, RoleOptions
from saccade.core.plan import PixelSlot
from saccade.core.types import ImageKey
from saccade.core.video import FrameBudget
from saccade.media import heif
from saccade.media.content import (
    RAW_MAGIC,
    Probe,
    digest,
    identify_soon,
    looks_like_video,
    name_pixels,
    read_raw,
)
from saccade.media.decode_dedup import Decoders
from saccade.media.decode_queue import check_memory
from saccade.media.documents import Documents, MeasuredFile, OpenedPage, at, has_renderer
from saccade.media.encoders import Encoders, question
from saccade.media.fairness import Requester
from saccade.media.fetch import Fetcher
from saccade.media.files import FileStore
from saccade.media.flights import ByteFlight, Flights, all_of
from saccade.media.opened import (
    EncodedBytes,
    Opened,
    OpenedImage,
    ReadTimes,
    SeenFrame,
    Spent,
    jobs_of,
)
from saccade.media.pool import DecodePool
from saccade.media.seen import SeenFiles
from saccade.media.sources import (
    Address,
    Base64,
    DrawnPage,
    FileId,
    ImageSource,
    KnownImage,
    SentFile,
    Source,
    VideoSource,
    addresses_of,
    beside,
    comes_along,
    in_company,
    is_video_file,
    name_of,
)
from saccade.media.stock import Stocks
from saccade.media.uploads import Uploads
from saccade.media.video import (
    assemble,
    check_decoder,
    check_frames,
    frame_name,
    has_decoder,
    rules_of,
    times_of_file,
    times_of_frames,
)

INLINE_BYTES = 1 << 20
"""Bytes hashed on the event loop (0.2 ms); more go to a thread."""
FRAMES_A_TURN = 32
"""Frames of a video that are read before others get their turn."""
REMEMBERED_NAMES = 1 << 16
"""Images that are known by a name that clients gave."""


Readable = Literal["images", "heic", "pdfs", "frames", "videos"]
"""What a request may hold besides text. frames: of a video, as a list; videos: as files."""


@dataclass(frozen=True, slots=True)
class _Read:
    """The outcome of reading one source."""

    encoded: EncodedBytes
    probe: Probe
    times: ReadTimes


class Media:
    """All images of one server.

    Everything runs on one event loop, where `start` and `close` are called.
    """

    def __init__(
        self,
        spec: FamilySpec,
        options: MediaOptions,
        arena: Arena,
        metrics: Metrics,
        role: RoleOptions = RoleOptions(),  # noqa: B008 - frozen
        stocks: Stocks | None = None,
        cards: Path | None = None,
    ) -> None:
        """`stocks`: processes that image workers are forked from, if shared. `cards`: the folder of
        cards that outlive the server, or None.
        """
        self._spec = spec
        self._options = options
        self._arena = arena
        self._metrics = metrics
        self.encoders = Encoders(role, arena, metrics)
        self.files = Uploads(FileStore(options.files_folder, options.files_mb * MIB))
        self._fetcher = Fetcher(options, metrics)
        own = spec.sample.own if spec.sees_images else None
        pool = DecodePool(arena, options, metrics, stocks, own)
        self._decoders = Decoders(pool, metrics)
        self._reads = Flights()
        self._encoded: WeakValueDictionary[bytes, EncodedBytes] = WeakValueDictionary()  # by digest
        self.seen = SeenFiles(cards, options.max_image_pixels)
        self.documents = Documents(spec, options, metrics, self.seen.disk, stocks)
        self._known: LRUCache[tuple[str, str], tuple[bytes, Probe]] = LRUCache(REMEMBERED_NAMES)
        """By salt and uuid: digest and header."""
        self.readable = _readable(spec)
        self._held: dict[ImageKey, list[OpenedImage]] = {}
        self._spent: dict[ImageKey, Spent] = {}  # same keys

    def start(self) -> None:
        """Start the image workers in the background, where the model sees images."""
        if self._spec.sees_images:
            self._decoders.pool.start()

    async def close(self) -> None:
        await self.encoders.close()
        await self._decoders.close()
        await self.documents.close()
        await self._fetcher.close()
        await self._reads.close()
        self.files.close()
        await asyncio.to_thread(self.seen.close)

    async def open_all(
        self, sources: Sequence[Source], salt: str, asker: Requester | None = None
    ) -> tuple[Opened, ...]:
        """Open a request's images and videos beside each other; a source named several times is
        read once. The first failure ends the rest. `client` takes turns with other clients; by
        default the salt. Raises as `open` does.
        """
        self.check_sources(sources)
        sources = in_company(sources, self._spec.pixel_bounds)
        asker, reads = asker or Requester(salt, tenant=salt), dict[Hashable, asyncio.Task[_Read]]()
        for source in sources:
            video = is_video_file(source)
            for url in addresses_of(source):
                if isinstance(source, VideoSource) and not video and comes_along(url):
                    continue  # frames that are there take no task each
                if (name := (name_of(url), video)) not in reads:
                    reads[name] = asyncio.create_task(self._read(url, salt, asker, video))
        opening: list[asyncio.Task[Opened]] = [
            asyncio.create_task(
                self._identify(source, salt, asker, reads[name_of(source.url), False])
                if isinstance(source, ImageSource)
                else self._identify_frames(source, salt, asker, reads)
            )
            for source in sources
        ]
        opened = tuple(await all_of(opening, reads.values()))
        await self.seen.recall_same([image for each in opened for image in each.images])
        return opened

    async def open_files(
        self,
        sources: Sequence[SentFile],
        salt: str,
        asker: Requester,
        others: int = 0,
        fits: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> list[tuple[OpenedPage, ...] | ImageSource]:
        """Return each file's pages, or the source of the image in the file. A file named several
        times is read once.

        Before a page is read, `fits` hears the tokens that each file's images take, beside `others`
        in the prompt, and may raise. Raises as `open` does, for a file that is no image later.
        """
        self._check_count(len(sources), sources[-1].param)
        if not self._spec.sees_images:
            for source in (each for each in sources if self.documents.shows(each.view)):
                self._check_seen(source.param)
        reads = dict[Hashable, asyncio.Task[EncodedBytes]]()
        for source in sources:
            if (name := name_of(source.url)) not in reads:
                reads[name] = asyncio.create_task(self._read_bytes(source.url, salt, asker))
        measuring = [
            asyncio.create_task(
                self.documents.measure(source, reads[name_of(source.url)], salt, asker)
            )
            for source in sources
        ]
        measured = await all_of(measuring, reads.values())
        others += sum(isinstance(found, ImageSource) for found in measured)
        documents = [found for found in measured if isinstance(found, MeasuredFile)]
        images = others + sum(found.images for found in documents)
        self._check_count(images, sources[-1].param)
        fits([self._tokens(found, images) for found in measured])
        opening = [
            asyncio.create_task(self.documents.open(found, source.param, salt, asker))
            for source, found in zip(sources, measured, strict=True)
        ]
        return await all_of(opening, ())

    def _tokens(self, found: MeasuredFile | ImageSource, images: int) -> int:
        """Count the tokens of a document's pages as images, in a prompt of so many."""
        if isinstance(found, ImageSource) or not found.images:
            return 0
        bounds = self._spec.pixel_bounds
        bounds = beside(found.budget, images, bounds).apply(bounds)
        recipes = (self._spec.recipe(*size, bounds) for size in found.drawn if size is not None)
        return sum(self._spec.num_tokens(recipe.grid) for recipe in recipes)

    async def _read_bytes(self, url: Address, salt: str, asker: Requester) -> EncodedBytes:
        return await self._named(await self._bytes(url, salt, asker))

    async def _named(self, data: bytes) -> EncodedBytes:
        """Bytes by digest, held once."""
        name = digest(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(digest, data)
        return self._encoded.setdefault(name, EncodedBytes(data, name))

    def check_sources(self, sources: Sequence[Source]) -> None:
        """Raises InvalidRequest for images sent to a model without vision, for videos sent to a
        model that takes none, and beyond the images and videos of one request.
        """
        if sources:
            self._check_seen(sources[0].param)
        for source in sources:
            if isinstance(source, VideoSource):
                rules = rules_of(self._spec, source.param)
                if isinstance(source.url, tuple):
                    times_of_frames(source, rules)
                else:
                    check_decoder(source.param)
        limit = self._options.max_images_per_request
        self._check_count(
            len(sources), sources[min(limit, len(sources) - 1)].param if sources else ""
        )

    def _check_count(self, count: int, param: str) -> None:
        """Raises InvalidRequest for more images than one request may have."""
        limit = self._options.max_images_per_request
        if count > limit:
            raise InvalidRequest(
                f"the request has {count} images; the limit is {limit}: send fewer, "
                "or start the server with a larger "
                "--max-images-per-request",
                param=param,
                code="too_many_images",
            )

    async def open(
        self, source: ImageSource, salt: str, asker: Requester | None = None
    ) -> OpenedImage:
        """Name an image and its cost, without decoding it.

        Bytes from elsewhere are counted in the asker's room before the read. Raises ImageError
        (TooLarge, NotFound) with `param` set for a failed fetch, bytes of no image, or a passed
        limit; Overloaded without room or a turn.
        """
        (opened,) = await self.open_all((source,), salt, asker)
        assert isinstance(opened, OpenedImage)
        return opened

    async def _identify(
        self, source: ImageSource, salt: str, asker: Requester, reading: asyncio.Task[_Read]
    ) -> Opened:
        try:
            read = await reading
            named = read.encoded.digest, read.probe, source.budget, salt, self._spec
            content = await identify_soon(*named)
            self._check_fits(content.recipe.canvas)
            check_memory(
                read.probe, len(read.encoded.data), content.recipe, self._options.decode_memory
            )
        except (ImageError, TooLarge, NotFound) as error:
            raise at(error, source.param) from error
        if source.uuid:
            self._known[salt, source.uuid] = read.encoded.digest, read.probe
        frame = SeenFrame(read.encoded.digest, read.encoded, read.probe, content.recipe)
        return OpenedImage(content.image, (frame,), asker, read.times, source.budget)

    async def _identify_frames(
        self,
        source: VideoSource,
        salt: str,
        asker: Requester,
        reads: Mapping[Hashable, asyncio.Task[_Read]],
    ) -> Opened:
        """Open a video: a file, or frames that come as images."""
        rules = rules_of(self._spec, source.param)
        is_file = is_video_file(source)
        try:
            read = (
                [await reads[name_of(source.url), True]]
                if not isinstance(source.url, tuple)
                else await self._read_frames(source.url, salt, asker, reads)
            )
            probes = [each.probe for each in read]
            if is_file:
                times = times_of_file(source, probes[0], rules)
            else:
                times = times_of_frames(source, rules)
                check_frames(probes, source.param)
            budget = FrameBudget(source.count or len(times.indices), source.wishes)
            recipe = rules.recipe(budget.count, *probes[0].upright, budget.wishes)
            height, width = recipe.canvas
            self._check_fits((rules.frames * height, width))
            largest = max(read, key=lambda each: len(each.encoded.data))
            nbytes = len(largest.encoded.data)
            check_memory(largest.probe, nbytes, recipe, self._options.decode_memory)
        except (ImageError, TooLarge, NotFound, InvalidRequest) as error:
            raise at(error, source.param) from error
        if is_file:
            (file,) = (each.encoded for each in read)
            turned = probes[0].orientation
            frames = [
                SeenFrame(frame_name(file.digest, index, turned), file, probes[0], recipe, index)
                for index in times.indices
            ]
        else:
            frames = [
                SeenFrame(each.encoded.digest, each.encoded, each.probe, recipe) for each in read
            ]
        spent = ReadTimes.together([each.times for each in read])
        asked = None if is_file else budget
        return assemble(frames, times, self._spec, rules, salt, asker, spent, asked)

    async def _read_frames(
        self,
        urls: Sequence[Address],
        salt: str,
        asker: Requester,
        reads: Mapping[Hashable, asyncio.Task[_Read]],
    ) -> list[_Read]:
        """Frames that come as images. Other requests get a turn every few frames; headers of new
        frames are read beside each other.
        """
        found: dict[Hashable, _Read | asyncio.Task[_Read]] = {}
        try:
            for number, url in enumerate(urls):
                if (name := name_of(url)) in found or (name, False) in reads:
                    continue
                encoded, begun, fetched = await self._encode(url, salt, asker)
                probe = self.seen.get(encoded.digest, asker.tenant)
                if probe is None:
                    rest = self._with_header(encoded, begun, fetched, asker)
                    found[name] = asyncio.create_task(rest)
                else:
                    times = ReadTimes((fetched - begun) * 1e3, 0.0, begun)
                    found[name] = _Read(encoded, probe, times)
                if number % FRAMES_A_TURN == FRAMES_A_TURN - 1:
                    await asyncio.sleep(0)
            each = [found.get(name_of(url)) or reads[name_of(url), False] for url in urls]
            return [one if isinstance(one, _Read) else await one for one in each]
        finally:
            for task in found.values():
                if not isinstance(task, _Read):
                    task.cancel()

    async def _read(self, url: Address, salt: str, asker: Requester, video: bool = False) -> _Read:
        """The bytes of a source, their digest, and their header."""
        if isinstance(url, KnownImage):
            return self._recall(url, salt)
        if isinstance(url, DrawnPage):
            return _Read(self._drawn(url.encoded), url.probe, ReadTimes(0.0, 0.0, url.begun))
        encoded, begun, fetched = await self._encode(url, salt, asker)
        return await self._with_header(encoded, begun, fetched, asker, video)

    async def _encode(
        self, url: Address, salt: str, asker: Requester
    ) -> tuple[EncodedBytes, float, float]:
        """The bytes of a source with their digest, and the times of their first and last byte."""
        assert not isinstance(url, KnownImage | DrawnPage)
        begun = time.monotonic()
        data = await self._bytes(url, salt, asker)
        fetched = time.monotonic()
        return await self._named(data), begun, fetched

    async def _with_header(
        self,
        encoded: EncodedBytes,
        begun: float,
        fetched: float,
        asker: Requester,
        video: bool = False,
    ) -> _Read:
        found = await self._header(encoded.digest, encoded.data, asker, video)
        done = time.monotonic()
        times = ReadTimes((fetched - begun) * 1e3, (done - fetched) * 1e3, begun)
        return _Read(encoded, found, times)

    def _drawn(self, page: EncodedBytes) -> EncodedBytes:
        """A page, with the bytes held for a request in flight, if any."""
        return self._encoded.setdefault(page.digest, page) if page.data else page

    def _recall(self, known: KnownImage, salt: str) -> _Read:
        """The remembered facts of an image: with bytes only while a request holds the image.

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
        return _Read(encoded, probe, ReadTimes(0.0, 0.0, time.monotonic()))

    async def _header(
        self, name: bytes, data: bytes, asker: Requester, video: bool = False
    ) -> Probe:
        """The header of these bytes: read by an image worker, once. Raises ImageError."""
        if not data:
            raise ImageError(f"the {'video' if video else 'image'} is empty (0 bytes)")
        found = await self.seen.find(name, video, asker.tenant)
        if found is None:
            # Our own format, without a parser; its bytes may be many.
            raw = data.startswith(RAW_MAGIC)
            found = (
                read_raw(data)
                if raw and not video
                else await self._decoders.pool.read_header(name, data, asker, video)
            )
            self.seen.put(name, video, asker.tenant, found)
        return found

    async def _bytes(self, url: Address, salt: str, asker: Requester) -> bytes:
        assert not isinstance(url, KnownImage | DrawnPage), "these are not fetched"
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
        """The content of one of the asker's files, from a request in flight with the same bytes if
        any.
        """
        stored = await self.files.find(id, asker.owner)
        if (held := self._encoded.get(stored.digest)) is not None:
            asker.room.reserve(len(held.data))
            return held.data

        async def read(flight: ByteFlight) -> bytes:
            flight.grow(stored.nbytes)
            return await self.files.read(id, asker.owner)

        return await self._reads.join(stored.digest, asker, read)

    async def check(self, data: bytes, param: str, client: Client = ANYBODY) -> None:
        """Check that a request of this client could name these bytes as an image, a video, or a
        document.

        Raises InvalidRequest, ImageError or TooLarge with the reason.
        """
        asker = Requester(client.share(""), client.name, tenant=client.tenant(""))
        try:
            self._fetcher.check_size(len(data))
            if self.documents.takes(data, param):
                await self.documents.check(await self._named(data), client.salt(""), asker)
                return
            self._check_seen(param)
            if video := looks_like_video(data) and self._spec.video is not None:
                check_decoder(param)
            name = await asyncio.to_thread(digest, data)
            await self._header(name, data, asker, video)
        except (ImageError, TooLarge) as error:
            raise at(error, param) from error

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

        Images within the model's bound fit; rounding up to whole patches may pass the bound.
        """
        height, width = size
        if height * width * 3 > self._arena.size:
            raise ImageError(
                f"the image is {width} x {height} px after resizing, "
                f"{height * width * 3 / 2**20:.0f} MiB; shared memory holds "
                f"{self._arena.size / 2**20:.0f} MiB: set a smaller max_pixels, or start the "
                "server with a larger --tune arena_mb=MIB",
                code="image_too_large",
            )

    # ---- requests in flight

    def hold(self, opened: OpenedImage) -> None:
        """A request in flight names this image: the bytes stay until as many `release`s."""
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

    async def bring(self, key: ImageKey, slot: PixelSlot) -> bytes | None:
        """Bring a held image into its slot: as `decode`, unless an encoder gives the embedding:
        then returns None. Raises as `decode` does.
        """
        held = self._held.get(key, ())
        opened = next((each for each in held if each.there), next(iter(held), None))
        if (
            opened is not None
            and opened.budget is not None
            and self.encoders.fits(opened.image.num_tokens, slot)
        ):
            answer = await self.encoders.ask(*question(opened, self.encoders.tower), slot)
            if spent := self._spent.get(key):
                spent.encoder, spent.encoder_ms = answer.outcome, answer.ms
            if answer.outcome == "embedding":
                return None
        return await self.decode(key, slot)

    async def decode(self, key: ImageKey, slot: PixelSlot) -> bytes:
        """Decode a held image into its slot. After the return nothing writes to the slot. Returns
        the pixels' name.

        Raises ImageError for bytes that cannot be decoded or that no request in flight holds,
        EngineUnavailable without image workers, CancelledError after `call_off`.
        """
        if key not in self._held:
            raise ImageError("the request that named this image has ended")
        opened = next((each for each in self._held[key] if each.there), None)
        if opened is None:  # they came with an earlier request
            opened = await self._draw_again(key)
        if opened is None:
            raise ImageError(
                "an image that is named by its uuid alone is not cached any more: send it with its "
                "URL or bytes",
                code="unknown_uuid",
            )
        assert (slot.height, slot.width) == opened.image.canvas
        jobs = jobs_of(opened)
        await self._decoders.decode(key, jobs, slot)
        if spent := self._spent.get(key):
            spent.decode_ms = sum(job.ms for job in jobs)
            spent.decoded = time.monotonic()
        frames = len(opened.frames)
        pixels = self._arena.flat(slot.offset, 3 * slot.height * slot.width)
        if len(pixels) <= INLINE_BYTES:
            return name_pixels(pixels, opened.image, frames)
        return await asyncio.to_thread(name_pixels, pixels, opened.image, frames)

    async def _draw_again(self, key: ImageKey) -> OpenedImage | None:
        """A held image drawn from a document's page, with the bytes. Raises as `decode`."""
        for opened in self._held[key]:
            frame, *others = opened.frames
            if others or (page := frame.encoded.page) is None:
                continue
            png = await self.documents.draw(page, opened.asker)
            if digest(png) != frame.encoded.digest:
                raise ImageError("a page of the PDF is not drawn as it was before: send it again")
            encoded = self._drawn(replace(frame.encoded, data=png))
            return replace(opened, frames=(replace(frame, encoded=encoded),))
        return None

    def call_off(self, key: ImageKey) -> None:
        """Nobody needs the image being decoded: `decode` ends."""
        self.encoders.call_off(key)
        self._decoders.call_off(key)

    def encoded(self, key: ImageKey, ms: float, at: float) -> None:
        """The engine has encoded an image, in `ms`, and ended `at`."""
        if spent := self._spent.get(key):
            spent.encode_ms, spent.encoded = ms, at

    @property
    def held(self) -> int:
        """Images of requests in flight."""
        return len(self._held)

    def spent(self, key: ImageKey) -> Spent:
        """The cost of an image so far, for the requests that hold the image."""
        return self._spent.get(key) or Spent()

    def holds(self, nbytes: int) -> bool:
        """True if shared memory is as large."""
        return nbytes <= self._arena.size

    def embedding(self, offset: int, nbytes: int) -> memoryview:
        """The engine's part of the arena that is to be sent."""
        return self._arena.flat(offset, nbytes)


def _readable(spec: FamilySpec) -> tuple[Readable, ...]:
    """List what this model and this installation read."""
    found: dict[Readable, bool] = {
        "images": spec.sees_images,
        "heic": spec.sees_images and heif.INSTALLED,
        "pdfs": has_renderer(),
        "frames": spec.video is not None,
        "videos": spec.video is not None and has_decoder(),
    }
    return tuple(kind for kind, yes in found.items() if yes)
