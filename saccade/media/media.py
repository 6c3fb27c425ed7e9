"""Runs all steps of an image in the front end: fetch, hash, read the header, and decode if needed.

open:           URL -> bytes -> digest -> header -> key, size, tokens. Nothing is decoded.
hold_image:     keep the bytes while a request in flight uses the image.
decode:         the engine requested the pixels: decode them into the slot that it chose.
call_off:       the engine no longer needs the pixels: cancel the decode.
release_image:  the request has ended.
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
from saccade.core.settings import FileSettings
from saccade.core.types import ImageKey
from saccade.media.content import PixelNames, name_pixels
from saccade.media.file_cache import FileCache
from saccade.media.kind import MediaKinds
from saccade.media.opened import Opened, OpenedImage, Spent
from saccade.media.reasons import READS_HEIC
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import ImageSource, Source, in_company
from saccade.media.sources.source_reader import INLINE_BYTES, Reads, SourceReader, all_of
from saccade.media.workers.decode_queue import PixelLimits
from saccade.media.workers.fork_server import ForkServers
from saccade.media.workers.pool import DecodePool, Decoders
from saccade.plugin import MediaCard
from saccade.plugins import builder

if TYPE_CHECKING:
    from saccade.media.embedding_source import EmbeddingSource
    from saccade.media.pixel_prints import PixelPrints
    from saccade.media.sources.uploaded import UploadedFiles

Readable = Literal["images", "heic", "pdfs", "frames", "videos"]
"""What a request may contain besides text. "frames" are a list of a video's frames, and "videos"
are video files.
"""


ERRORS = (ImageError, TooLarge, NotFound, InvalidRequest)
"""Errors that a source causes, unlike errors of the server."""


def at(error: RequestError, param: str) -> RequestError:
    """Return a copy of an error with `param` set, unless it was already set.

    It is a copy because more than one request may receive the same error from a shared read.
    """
    kind = ImageError if isinstance(error, ImageError) else type(error)
    return kind(error.message, error.param or param, error.code)


class Media:
    """Opens, holds and decodes the images of one server.

    All methods must be called on one event loop.
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
        """Create the readers and decoders. No process is started before `start`.

        fork_servers: existing processes from which image workers are forked, or None to create
            them.
        metadata_folder: the directory for metadata that is kept across restarts, or None to keep
            none.
        cards: describe the kinds of media that plugins add.
        """
        self.spec = spec
        self._layout = spec.tiles
        self._options = media = options.media
        self._arena = arena
        self._metrics = metrics
        build = builder(lambda plugin: plugin.requests.embeddings, options)
        self.encoders: EmbeddingSource | None = build and build(options, arena, metrics)
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
        self._spent: dict[ImageKey, Spent] = {}  # has the same keys as `_held`
        self._prints: PixelPrints | None = None

    @property
    def readable(self) -> tuple[Readable, ...]:
        """The media types that both the model and the installation support."""
        images: tuple[Readable, ...] = ("images", "heic") if READS_HEIC else ("images",)
        return (*(images if self.spec.sees_images else ()), *self.kinds.readable())

    @property
    def files(self) -> UploadedFiles:
        """The files that clients have uploaded."""
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
        """Open a request's images and videos concurrently.

        A source that occurs more than once is read once. The first failure cancels the other reads.
        Raises ImageError, TooLarge or NotFound, with `param` set, if a source cannot be fetched or
        read. Raises Overloaded if the budget is used up or the request has waited too long in a
        queue.

        salt: part of the images' keys.
        requester: identifies the client for fair queues. The default is one client per salt.
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
        """Raise InvalidRequest if the model does not support a source, or there are too many
        images.

        The limit is `--max-images-per-request`.
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
        """Raise InvalidRequest if `count` exceeds `--max-images-per-request`."""
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
        """Fetch an image, and return its key and its cost without decoding it.

        Bytes that are fetched or read from a file are counted in the requester's budget before they
        are read. Raises ImageError, TooLarge or NotFound, with `param` set, if the fetch fails, the
        bytes are not an image, or a limit is exceeded. Raises Overloaded if the budget is used up
        or the request has waited too long in a queue.
        """
        (opened,) = await self.open_all((source,), salt, requester)
        assert isinstance(opened, OpenedImage)
        return opened

    def check_seen(self, param: str) -> None:
        """Raise InvalidRequest if the model has no vision encoder."""
        if not self.spec.sees_images:
            raise InvalidRequest(
                f"{param}: this model supports only text: send no images, or use a model with a "
                "vision encoder",
                param,
                "no_vision",
            )

    # ---- requests in flight

    def hold_image(self, opened: OpenedImage) -> None:
        """Keep an image's bytes for a request in flight.

        Call `release_image` once for each call.
        """
        self._metrics.inc("saccade_images_received_total")
        self._held.setdefault(opened.image.key, []).append(opened)
        self._spent.setdefault(opened.image.key, Spent())

    def release_image(self, opened: OpenedImage) -> None:
        """Release an image's bytes, unless another call of `hold_image` still keeps them."""
        key = opened.image.key
        self._held[key].remove(opened)
        if not self._held[key]:
            del self._held[key], self._spent[key]

    # ---- requests from the engine

    async def bring(self, key: ImageKey, slot: PixelSlot) -> PixelNames | None:
        """Fill an image's slot in the arena.

        If an encoder server returns the embedding, write this and return None. Otherwise write the
        pixels and return the result of `decode`. Raises ImageError if the bytes cannot be decoded,
        EngineUnavailable if no image worker runs, and CancelledError after `call_off`.
        """
        if self.encoders is not None and await self._given(self.encoders, key, slot):
            return None
        return await self.decode(key, slot)

    async def _given(self, encoders: EmbeddingSource, key: ImageKey, slot: PixelSlot) -> bool:
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
        """Decode an image into its slot in the arena, and return the hashes of its pixels.

        The slot is not written after the call has ended, even if the call fails. Raises ImageError
        if the bytes cannot be decoded or no request holds the image any longer, EngineUnavailable
        if no image worker runs, and CancelledError after `call_off`.
        """
        if key not in self._held:
            raise ImageError("the request with this image has finished")
        # Try the requests that have the bytes in memory first. The others may only have a uuid.
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
        key, image, frames = opened.image.key, opened.image, len(opened.frames)
        pixels = self._arena.flat(slot.offset, 3 * slot.height * slot.width)
        if self._prints is not None:
            await self._prints.take(key, pixels, image.canvas)
        if self._layout is not None and (tiles := self._layout.tiles(image.grid)):
            self._metrics.inc("saccade_tile_bytes_hashed_total", len(pixels))
            from saccade.media.tiles import name_tiles  # only for models that tile images

            return await asyncio.to_thread(name_tiles, pixels, image, tiles)
        if len(pixels) <= INLINE_BYTES:
            return PixelNames(name_pixels(pixels, image, frames))
        return PixelNames(await asyncio.to_thread(name_pixels, pixels, image, frames))

    def call_off(self, key: ImageKey) -> None:
        """Cancel the decode of an image, and its request to an encoder server."""
        if self.encoders is not None:
            self.encoders.call_off(key)
        self.decoders.call_off(key)

    def encoded(self, key: ImageKey, ms: float, at: float) -> None:
        """Record that the engine has encoded an image.

        ms: how long that took, in milliseconds.
        at: when it finished, on the monotonic clock.
        """
        if spent := self._spent.get(key):
            spent.encode_ms, spent.encoded = ms, at

    @property
    def prints(self) -> PixelPrints:
        """The pixel fingerprints of images. None are computed before this is first accessed."""
        if self._prints is None:
            from saccade.media.pixel_prints import PixelPrints

            self._prints = PixelPrints()
        return self._prints

    @property
    def held(self) -> int:
        """The number of images that requests in flight use."""
        return len(self._held)

    def spent(self, key: ImageKey) -> Spent:
        """Return the time spent so far on an image in flight, or zeros if no request holds it."""
        return self._spent.get(key) or Spent()

    def tile_parts(self, key: ImageKey) -> tuple[Part, ...]:
        """Return which part of the image each tile of an image in flight covers, or () if
        unknown.
        """
        opened = next(iter(self._held.get(key, ())), None)
        if opened is None or self._layout is None:
            return ()
        from saccade.media.tiles import parts_of

        return parts_of(opened.frames[0].recipe, self._layout.tiles(opened.image.grid))

    def holds(self, nbytes: int) -> bool:
        """Return True if the arena has at least `nbytes` bytes."""
        return nbytes <= self._arena.size

    def embedding(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes at `offset` in the arena, where the engine has stored an embedding."""
        return self._arena.flat(offset, nbytes)
