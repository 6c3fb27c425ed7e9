"""The path of an image through the front, in one object: fetch, digest, probe, and, only where
needed, decode.

    open:          URL -> bytes -> digest -> header -> key, size, tokens.       No decoding.
    hold:          a request in flight names the image: keep the bytes.
    decode:        the engine asked for the pixels: into the slot it named.
    call_off:      the engine needs no pixels any more.
    release:       the request has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from saccade.core.arena import Arena
from saccade.core.errors import ImageError, InvalidRequest, NotFound, RequestError, TooLarge
from saccade.core.family import FamilySpec, Part
from saccade.core.metrics import Metrics
from saccade.core.options import ServeOptions
from saccade.core.plan import PixelSlot
from saccade.core.settings import FetchSettings, FileSettings, RoleSettings
from saccade.core.types import ImageKey
from saccade.media.content import PixelNames, name_pixels
from saccade.media.formats import heif
from saccade.media.kind import MediaKinds
from saccade.media.metadata_store import FileCache
from saccade.media.opened import Opened, OpenedImage, Spent
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import ImageSource, Source, in_company
from saccade.media.sources.source_reader import INLINE_BYTES, Reads, SourceReader, all_of
from saccade.media.workers.decode_queue import PixelLimits
from saccade.media.workers.fork_server import ForkServers
from saccade.media.workers.pool import DecodePool, Decoders
from saccade.plugin import MediaCard

if TYPE_CHECKING:
    from saccade.media.encoders import Encoders
    from saccade.media.pixel_prints import PixelPrints
    from saccade.media.sources.uploads import Uploads

Readable = Literal["images", "heic", "pdfs", "frames", "videos"]
"""What a request may hold besides text. frames: of a video, as a list; videos: as files."""


ERRORS = (ImageError, TooLarge, NotFound, InvalidRequest)
"""Errors of a source, not of the server."""


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
        options: ServeOptions,
        arena: Arena,
        metrics: Metrics,
        fork_servers: ForkServers | None = None,
        metadata_folder: Path | None = None,
        cards: Iterable[MediaCard] = (),
    ) -> None:
        """Build the parts for each kind of media. `fork_servers` are processes that image workers
        are forked from, if shared. `metadata_folder` is the folder for metadata that outlives the
        server, or `None`. `cards` are of the kinds in plugins.
        """
        self.spec = spec
        self._layout = spec.tiles
        self._options = media = options.media
        self._arena = arena
        self._metrics = metrics
        self.encoders: Encoders | None = None
        if (role := options.of(RoleSettings)).role == "language":
            from saccade.media.encoders import Encoders

            self.encoders = Encoders(role, arena, metrics, options.of(FetchSettings).fetch_timeout)
        own = spec.sample.own if spec.sees_images else None
        pool = DecodePool(arena, media, metrics, fork_servers, own)
        self.decoders = Decoders(pool, arena, metrics)
        self.seen = FileCache(metadata_folder, media.max_image_pixels)
        self.files_folder = options.of(FileSettings).folder
        self.reader = SourceReader(options, metrics, self.seen, pool)
        self.limits = PixelLimits(arena.size, media.decode_memory)
        self.kinds = MediaKinds(
            spec,
            options,
            metrics,
            self.limits,
            pool,
            self.seen.disk,
            fork_servers,
            cards,
        )
        self._held: dict[ImageKey, list[OpenedImage]] = {}
        self._spent: dict[ImageKey, Spent] = {}  # same keys
        self._prints: PixelPrints | None = None

    @property
    def readable(self) -> tuple[Readable, ...]:
        """The media types that the model and the installation support."""
        images: tuple[Readable, ...] = ("images", "heic") if heif.INSTALLED else ("images",)
        return (*(images if self.spec.sees_images else ()), *self.kinds.readable())

    @property
    def files(self) -> Uploads:
        """The uploaded files."""
        return self.reader.files

    def start(self) -> None:
        """Start the image workers in the background if the model sees images."""
        if self.spec.sees_images:
            self.decoders.pool.start()

    async def close(self) -> None:
        if self.encoders is not None:
            await self.encoders.close()
        await self.kinds.close()
        await self.decoders.close()
        await self.reader.close()
        await asyncio.to_thread(self.seen.close)

    async def open_all(
        self, sources: Sequence[Source], salt: str, requester: Requester | None = None
    ) -> tuple[Opened, ...]:
        """Open a request's images and videos concurrently. A source named several times is read
        once. The first failure ends the rest.

        `requester` is the unit of fairness and defaults to the salt. Raises as `open` does.
        """
        self.check_sources(sources)
        sources = in_company(sources, self.spec.pixel_bounds)
        requester = requester or Requester(salt, tenant=salt)
        await requester.budget.settle(requester.tenant)
        reads = Reads(self.reader, salt, requester)
        for source in sources:
            self.kinds.of(source).begin_reads(source, reads)
        opening = [asyncio.create_task(self._open(source, reads)) for source in sources]
        opened = tuple(await all_of(opening, reads))
        if self.seen.disk:
            await self.seen.recall_same([image for each in opened for image in each.images])
        return opened

    async def _open(self, source: Source, reads: Reads) -> Opened:
        kind = self.kinds.of(source)
        try:
            opened: Opened = await kind.units(source, await kind.metadata(source, reads), reads)
        except ERRORS as error:
            raise at(error, source.param) from error
        return opened

    def check_sources(self, sources: Sequence[Source]) -> None:
        """Raise InvalidRequest if the model or the limit forbids these sources.

        A model without vision takes text only. Some models refuse videos. One request has a limit
        for images and videos.
        """
        if sources:
            self.check_seen(sources[0].param)
        for source in sources:
            self.kinds.of(source).check(source)
        limit = self._options.max_images_per_request
        self.check_count(
            len(sources), sources[min(limit, len(sources) - 1)].param if sources else ""
        )

    def check_count(self, count: int, param: str) -> None:
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
        self, source: ImageSource, salt: str, requester: Requester | None = None
    ) -> OpenedImage:
        """Name an image and its cost before any decode.

        Bytes from elsewhere are counted in the requester's budget before the read. Raises
        ImageError (TooLarge, NotFound) with `param` set for a failed fetch, bytes that are no
        image, or a passed limit. Raises Overloaded if the budget is used up or the wait for a turn
        is too long.
        """
        (opened,) = await self.open_all((source,), salt, requester)
        assert isinstance(opened, OpenedImage)
        return opened

    def check_seen(self, param: str) -> None:
        """Raise InvalidRequest if the model lacks a vision encoder."""
        if not self.spec.sees_images:
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
            raise ImageError("the request with this image has finished")
        # Sources with bytes in this request before those of earlier ones.
        for opened in sorted(self._held[key], key=lambda each: not each.there):
            if (jobs := await self.kinds[opened.kind].pixels(opened)) is not None:
                break
        else:
            raise ImageError(
                "an image sent only by uuid is no longer cached: send its URL or bytes",
                code="unknown_uuid",
            )
        assert (slot.height, slot.width) == opened.image.canvas
        asked = time.monotonic()
        await self.decoders.decode(key, jobs, slot)
        if spent := self._spent.get(key):
            spent.decode_ms = sum(job.ms for job in jobs)
            spent.decoded = max(job.ended for job in jobs)
        try:
            return await self._name_pixels(opened, slot)
        finally:
            if spent := self._spent.get(key):
                spent.shipped = time.monotonic()
                spent.ship_ms = (spent.shipped - max(asked, spent.decoded)) * 1e3

    async def _name_pixels(self, opened: OpenedImage, slot: PixelSlot) -> PixelNames:
        """Return the names of the pixels in a slot."""
        key, image, frames = opened.image.key, opened.image, len(opened.frames)
        pixels = self._arena.flat(slot.offset, 3 * slot.height * slot.width)
        if self._prints is not None:
            await self._prints.take(key, pixels, image.canvas)
        if self._layout is not None and (tiles := self._layout.tiles(image.grid)):
            self._metrics.inc("saccade_tile_bytes_hashed_total", len(pixels))
            from saccade.media.tiles import name_tiles  # for towers that see tiles apart

            return await asyncio.to_thread(name_tiles, pixels, image, tiles)
        if len(pixels) <= INLINE_BYTES:
            return PixelNames(name_pixels(pixels, image, frames))
        return PixelNames(await asyncio.to_thread(name_pixels, pixels, image, frames))

    def call_off(self, key: ImageKey) -> None:
        """Cancel the image's decode and its question to an encoder."""
        if self.encoders is not None:
            self.encoders.call_off(key)
        self.decoders.call_off(key)

    def encoded(self, key: ImageKey, ms: float, at: float) -> None:
        """Record that the engine encoded an image in `ms` and ended `at`."""
        if spent := self._spent.get(key):
            spent.encode_ms, spent.encoded = ms, at

    @property
    def prints(self) -> PixelPrints:
        """Return the fingerprints of pixels. The first call enables them."""
        if self._prints is None:
            from saccade.media.pixel_prints import PixelPrints

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
        from saccade.media.tiles import parts_of

        return parts_of(opened.frames[0].recipe, self._layout.tiles(opened.image.grid))

    def holds(self, nbytes: int) -> bool:
        """Return True if shared memory has at least `nbytes`."""
        return nbytes <= self._arena.size

    def embedding(self, offset: int, nbytes: int) -> memoryview:
        """Return the engine's part of the arena that is to be sent."""
        return self._arena.flat(offset, nbytes)
