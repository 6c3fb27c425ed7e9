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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from saccade.core.arena import Arena
from saccade.core.client import ANYBODY, Client
from saccade.core.errors import ImageError, InvalidRequest, NotFound, RequestError, TooLarge
from saccade.core.family import FamilySpec, Part
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions, RoleOptions
from saccade.core.plan import PixelSlot
from saccade.core.types import ImageKey
from saccade.media.content import digest, looks_like_video, name_pixels
from saccade.media.documents import Documents, MeasuredFile, OpenedPage, PageSizes, has_renderer
from saccade.media.formats import heif
from saccade.media.kind import MediaKind
from saccade.media.opened import Kind, Opened, OpenedImage, Spent
from saccade.media.pixel_prints import PixelPrints
from saccade.media.regions import Regions
from saccade.media.seen import SeenFiles
from saccade.media.sources.fairness import Requester
from saccade.media.sources.fetch import Fetcher
from saccade.media.sources.files import FileStore
from saccade.media.sources.flights import all_of
from saccade.media.sources.source import ImageSource, SentFile, Source, beside, in_company
from saccade.media.sources.source_reader import INLINE_BYTES, Reads, SourceReader
from saccade.media.sources.uploads import Uploads
from saccade.media.stills import Stills
from saccade.media.tiles import PixelNames, name_tiles, parts_of
from saccade.media.video import check_decoder, has_decoder
from saccade.media.videos import Videos
from saccade.media.workers.decode_dedup import Decoders
from saccade.media.workers.decode_queue import PixelLimits
from saccade.media.workers.fork_server import ForkServers
from saccade.media.workers.pool import DecodePool

if TYPE_CHECKING:
    from saccade.media.encoders import Encoders

Readable = Literal["images", "heic", "pdfs", "frames", "videos"]
"""What a request may hold besides text. frames: of a video, as a list; videos: as files."""


FAULTS = (ImageError, TooLarge, NotFound, InvalidRequest)
"""What is wrong with a source, and not with the server."""


def at(error: RequestError, param: str) -> RequestError:
    """Give an error this request's place.

    One error from a shared read may reach several requests.
    """
    kind = ImageError if isinstance(error, ImageError) else type(error)
    return kind(error.message, error.param or param, error.code)


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
        fork_servers: ForkServers | None = None,
        metadata_folder: Path | None = None,
    ) -> None:
        """Build the parts for each kind of media. `fork_servers` are processes that image workers
        are forked from, if shared. `metadata_folder` is the folder for metadata that outlives the
        server, or `None`.
        """
        self._spec = spec
        self._layout = spec.tiles
        self._options = options
        self._arena = arena
        self._metrics = metrics
        self.encoders: Encoders | None = None
        if role.role == "language":
            from saccade.media.encoders import Encoders

            self.encoders = Encoders(role, arena, metrics, options.fetch_timeout)
        self.files = Uploads(FileStore(options.files_folder, options.files_bytes))
        self._fetcher = Fetcher(options, metrics)
        own = spec.sample.own if spec.sees_images else None
        pool = DecodePool(arena, options, metrics, fork_servers, own)
        self._decoders = Decoders(pool, metrics)
        self.seen = SeenFiles(metadata_folder, options.max_image_pixels)
        self.documents = Documents(spec, options, metrics, self.seen.disk, fork_servers)
        self.reader = SourceReader(self._fetcher, self.files, self.seen, pool)
        limits = PixelLimits(arena.size, options.decode_memory)
        stills = Stills(spec, limits)
        self.regions = Regions(spec, limits, stills, pool)
        self.kinds: Mapping[Kind, MediaKind[Any, Any, Any]] = {
            "still": stills,
            "video": Videos(spec, limits),
            "document": self.documents,
            "region": self.regions,
        }
        self.readable = _readable(spec)
        self._held: dict[ImageKey, list[OpenedImage]] = {}
        self._spent: dict[ImageKey, Spent] = {}  # same keys
        self._prints: PixelPrints | None = None

    def start(self) -> None:
        """Start the image workers in the background if the model sees images."""
        if self._spec.sees_images:
            self._decoders.pool.start()

    async def close(self) -> None:
        if self.encoders is not None:
            await self.encoders.close()
        await self.regions.close()
        await self._decoders.close()
        await self.documents.close()
        await self.reader.close()
        self.files.close()
        await asyncio.to_thread(self.seen.close)

    async def open_all(
        self, sources: Sequence[Source], salt: str, asker: Requester | None = None
    ) -> tuple[Opened, ...]:
        """Open a request's images and videos concurrently. A source named several times is read
        once. The first failure ends the rest.

        `asker` takes turns with other clients and defaults to the salt. Raises as `open` does.
        """
        self.check_sources(sources)
        sources = in_company(sources, self._spec.pixel_bounds)
        reads = Reads(self.reader, salt, asker or Requester(salt, tenant=salt))
        for source in sources:
            self.kinds[source.kind].begin_reads(source, reads)
        opening = [asyncio.create_task(self._open(source, reads)) for source in sources]
        opened = tuple(await all_of(opening, reads))
        if self.seen.disk:
            await self.seen.recall_same([image for each in opened for image in each.images])
        return opened

    async def _open(self, source: Source, reads: Reads) -> Opened:
        kind = self.kinds[source.kind]
        try:
            opened: Opened = await kind.units(source, await kind.metadata(source, reads), reads)
        except FAULTS as error:
            raise at(error, source.param) from error
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

        Before a page is read, `fits` hears the tokens that each file's images take in a prompt with
        `others` more, and may raise. Raises as `open` does, for a file that is no image later.
        """
        self._check_count(len(sources), sources[-1].param)
        if not self._spec.sees_images:
            for source in (each for each in sources if each.view.has_images):
                self._check_seen(source.param)
        reads = Reads(self.reader, salt, asker)
        for source in sources:
            self.documents.begin_reads(source, reads)
        measuring = [asyncio.create_task(self._measure(source, reads)) for source in sources]
        measured = await all_of(measuring, reads)
        others += sum(isinstance(found, ImageSource) for found in measured)
        documents = [found for found in measured if isinstance(found, MeasuredFile)]
        images = others + sum(found.images for found in documents)
        self._check_count(images, sources[-1].param)
        fits([self._tokens(found, images) for found in measured])
        opening = [
            asyncio.create_task(self._show(source, metadata, reads))
            for source, metadata in zip(sources, measured, strict=True)
        ]
        return await all_of(opening, ())

    async def _measure(self, source: SentFile, reads: Reads) -> MeasuredFile | ImageSource:
        try:
            return await self.documents.metadata(source, reads)
        except FAULTS as error:
            raise at(error, source.param) from error

    async def _show(
        self, source: SentFile, metadata: MeasuredFile | ImageSource, reads: Reads
    ) -> tuple[OpenedPage, ...] | ImageSource:
        try:
            return await self.documents.units(source, metadata, reads)
        except FAULTS as error:
            raise at(error, source.param) from error

    def _tokens(self, found: MeasuredFile | ImageSource, images: int) -> int:
        """Count the tokens of a document's pages as images, in a prompt with `images` images."""
        if isinstance(found, ImageSource) or not found.images:
            return 0
        bounds = self._spec.pixel_bounds
        bounds = beside(found.budget, images, bounds).apply(bounds)
        drawn = (each.kept for each in found.drawn if each is not None)
        recipes = (self._spec.recipe(*size, bounds) for size in drawn)
        return sum(self._spec.num_tokens(recipe.grid) for recipe in recipes)

    def check_sources(self, sources: Sequence[Source]) -> None:
        """Raise InvalidRequest if the model or the limit forbids these sources.

        A model without vision takes text only. Some models refuse videos. One request has a limit
        for images and videos.
        """
        if sources:
            self._check_seen(sources[0].param)
        for source in sources:
            self.kinds[source.kind].check(source)
        limit = self._options.max_images_per_request
        self._check_count(
            len(sources), sources[min(limit, len(sources) - 1)].param if sources else ""
        )

    def _check_count(self, count: int, param: str) -> None:
        """Raise InvalidRequest for more images than one request may have."""
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
        """Name an image and its cost before any decode.

        Bytes from elsewhere are counted in the asker's budget before the read. Raises ImageError
        (TooLarge, NotFound) with `param` set for a failed fetch, bytes that are no image, or a
        passed limit. Raises Overloaded if the budget is used up or the wait for a turn is too long.
        """
        (opened,) = await self.open_all((source,), salt, asker)
        assert isinstance(opened, OpenedImage)
        return opened

    async def check(self, data: bytes, param: str, client: Client = ANYBODY) -> PageSizes | None:
        """Check that this client could name these bytes as an image, a video, or a document.

        Returns the sizes of a document's pages. Raises InvalidRequest, ImageError or TooLarge with
        the reason.
        """
        asker = Requester.of(client)
        try:
            self._fetcher.check_size(len(data))
            if self.documents.takes(data, param):
                file = await self.reader.named(data)
                return await self.documents.check_file(file, client.salt(""), asker)
            self._check_seen(param)
            if video := looks_like_video(data) and self._spec.video is not None:
                check_decoder(param)
            name = await asyncio.to_thread(digest, data)
            await self.reader.header(name, data, asker, video)
            return None
        except FAULTS as error:
            raise at(error, param) from error

    def _check_seen(self, param: str) -> None:
        """Raise InvalidRequest if the model lacks a vision tower."""
        if not self._spec.sees_images:
            raise InvalidRequest(
                f"{param}: this model has no vision: it takes text only; send no images, or ask a "
                "model that has a vision tower",
                param,
                "no_vision",
            )

    # ---- requests in flight

    def hold_image(self, opened: OpenedImage) -> None:
        """Keep an image's bytes for a request in flight, until as many `release_image` calls."""
        self._metrics.inc("saccade_images_received_total")
        self._held.setdefault(opened.image.key, []).append(opened)
        self._spent.setdefault(opened.image.key, Spent())

    def release_image(self, opened: OpenedImage) -> None:
        """Release one `hold_image` when the request has ended."""
        key = opened.image.key
        self._held[key].remove(opened)
        if not self._held[key]:
            del self._held[key], self._spent[key]

    # ---- the engine's side

    async def bring(self, key: ImageKey, slot: PixelSlot) -> PixelNames | None:
        """Bring a held image into its slot. Returns `None` if an encoder gives the embedding, else
        what `decode` returns.

        Raises as `decode` does.
        """
        if self.encoders is not None and await self._given(self.encoders, key, slot):
            return None
        return await self.decode(key, slot)

    async def _given(self, encoders: Encoders, key: ImageKey, slot: PixelSlot) -> bool:
        """Ask for a held image's embedding. Returns True if it is in the slot."""
        held = self._held.get(key, ())
        opened = next((each for each in held if each.there), next(iter(held), None))
        if opened is None or opened.budget is None:
            return False
        if not encoders.fits(opened.image.num_tokens, slot):
            return False
        answer = await encoders.encode_image(opened, slot)
        if spent := self._spent.get(key):
            spent.encoder, spent.encoder_ms = answer.outcome, answer.ms
        return answer.outcome == "embedding"

    async def decode(self, key: ImageKey, slot: PixelSlot) -> PixelNames:
        """Decode a held image into its slot and return the pixels' names. Writes to the slot end
        with the call.

        Raises ImageError for bytes that cannot be decoded or that every request has released,
        EngineUnavailable without image workers, CancelledError after `call_off`.
        """
        if key not in self._held:
            raise ImageError("the request that named this image has ended")
        # Those whose bytes came with this request before those that came with an earlier one.
        for opened in sorted(self._held[key], key=lambda each: not each.there):
            if (jobs := await self.kinds[opened.kind].pixels(opened)) is not None:
                break
        else:
            raise ImageError(
                "an image that is named by its uuid alone is not cached any more: send it with its "
                "URL or bytes",
                code="unknown_uuid",
            )
        assert (slot.height, slot.width) == opened.image.canvas
        await self._decoders.decode(key, jobs, slot)
        if spent := self._spent.get(key):
            spent.decode_ms = sum(job.ms for job in jobs)
            spent.decoded = time.monotonic()
        image, frames = opened.image, len(opened.frames)
        pixels = self._arena.flat(slot.offset, 3 * slot.height * slot.width)
        if self._prints is not None:
            await self._prints.take(key, pixels, image.canvas)
        if self._layout is not None and (tiles := self._layout.tiles(image.grid)):
            self._metrics.inc("saccade_tile_bytes_named_total", len(pixels))
            return await asyncio.to_thread(name_tiles, pixels, image, tiles)
        if len(pixels) <= INLINE_BYTES:
            return PixelNames(name_pixels(pixels, image, frames))
        return PixelNames(await asyncio.to_thread(name_pixels, pixels, image, frames))

    def call_off(self, key: ImageKey) -> None:
        """Cancel the image's decode and its question to an encoder."""
        if self.encoders is not None:
            self.encoders.call_off(key)
        self._decoders.call_off(key)

    def encoded(self, key: ImageKey, ms: float, at: float) -> None:
        """Record that the engine encoded an image in `ms` and ended `at`."""
        if spent := self._spent.get(key):
            spent.encode_ms, spent.encoded = ms, at

    @property
    def prints(self) -> PixelPrints:
        """Return what tells images' pixels apart. Who first asks turns it on."""
        if self._prints is None:
            self._prints = PixelPrints()
        return self._prints

    @property
    def held(self) -> int:
        """Count the images of requests in flight."""
        return len(self._held)

    def spent(self, key: ImageKey) -> Spent:
        """Return the cost of an image so far, for the requests that hold the image."""
        return self._spent.get(key) or Spent()

    def tile_parts(self, key: ImageKey) -> tuple[Part, ...]:
        """Return what each tile shows of an image in flight. Empty if unknown."""
        opened = next(iter(self._held.get(key, ())), None)
        if opened is None or self._layout is None:
            return ()
        return parts_of(opened.frames[0].recipe, self._layout.tiles(opened.image.grid))

    def holds(self, nbytes: int) -> bool:
        """Return True if shared memory has at least `nbytes`."""
        return nbytes <= self._arena.size

    def embedding(self, offset: int, nbytes: int) -> memoryview:
        """Return the engine's part of the arena that is to be sent."""
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
