"""Regions are rectangular parts of still images, which the model sees as separate images at full
detail.

The first region of an image decodes the full image, and its pixels are cached. Later regions are
cropped from the cached pixels.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import msgspec
import numpy as np
from blake3 import blake3
from cachetools import TTLCache

from saccade.core.errors import ImageError
from saccade.core.recipe import Box
from saccade.core.recipe import whole as whole_of
from saccade.media.content import RAW, Probe, encode_array, identify_soon
from saccade.media.kind import KindContext
from saccade.media.opened import CachedFrame, OpenedImage, PartOfImage, jobs_of
from saccade.media.sources.fairness import Requester
from saccade.media.sources.single_flight import SingleFlight
from saccade.media.sources.source import ImageRegion, RegionSource
from saccade.media.sources.source_reader import Reads, SourceRead
from saccade.media.workers.decode_queue import Job, decoding_bytes
from saccade.media.workers.orders import MAX_RETURNED

PIXEL_CACHE_DIVISOR = 16
"""The pixel cache gets this fraction (1 / 16) of decode memory: 160 MiB, or 27 screens of 1080p."""
PIXEL_CACHE_SECONDS = 3600.0
UNCOUNTED = Requester()
"""Requests the pixels of a full image. They belong to the cache, so no request's budget counts
them.
"""


class Regions:
    """Reads regions. A region of the full image is treated as a still image."""

    def __init__(self, context: KindContext) -> None:
        limits = context.limits
        self._spec = context.spec
        self._limits = limits
        self._kinds = context.kinds
        self._pool = context.pool
        self._flights = SingleFlight()
        self._held: TTLCache[tuple[str, bytes], bytes] = TTLCache(
            limits.memory // PIXEL_CACHE_DIVISOR, PIXEL_CACHE_SECONDS, getsizeof=len
        )
        """Cached pixels (upright RGB), by tenant and digest."""
        self._cut = 0
        """Bytes of cropped regions whose resizing has not finished."""

    def forget(self) -> None:
        """Release all cached pixels."""
        self._held.clear()

    async def close(self) -> None:
        await self._flights.close()

    def check(self, source: RegionSource) -> None:
        """Do nothing: a model with vision supports all regions."""

    def begin_reads(self, source: RegionSource, reads: Reads) -> None:
        reads.read_source(source.url)

    async def metadata(self, source: RegionSource, reads: Reads) -> SourceRead:
        return await reads.read_source(source.url)

    async def units(self, source: RegionSource, metadata: SourceRead, reads: Reads) -> OpenedImage:
        encoded, whole, salt = metadata.encoded, metadata.probe, reads.salt
        box = _box(source.region, whole.upright)
        height, width = box.bottom - box.top, box.right - box.left
        if (height, width) == whole.upright:
            return await self._whole(source, metadata, reads)
        probe = replace(whole, height=height, width=width, orientation=1)
        name = _name(encoded.digest, box)
        found = await identify_soon(name, probe, source.budget, salt, self._spec)
        self._limits.check(found.recipe.canvas, whole, len(encoded.data), found.recipe)
        if source.uuid:
            reads.reader.remember(salt, source.uuid, metadata)
        part = PartOfImage(whole, box)
        frame = CachedFrame(name, encoded, probe, found.recipe, part=part)
        return OpenedImage("region", found.image, (frame,), reads.requester, metadata.times)

    async def _whole(self, source: RegionSource, metadata: SourceRead, reads: Reads) -> OpenedImage:
        opened: OpenedImage = await self._kinds["still"].units(source, metadata, reads)
        return opened

    async def pixels(self, image: OpenedImage) -> list[Job] | None:
        """Return the job that crops and resizes the region, or None if the image's bytes were
        dropped.

        It crops from cached pixels, or decodes the full image again if this is too large for the
        cache.
        """
        part = image.frames[0].part
        assert part is not None
        (job,) = jobs_of(image)
        whole = replace(job, probe=part.whole)
        pixels = self._held.get(job.name)
        if pixels is None and image.there and self._holds(whole):
            pixels = await self._flights.join(job.name, UNCOUNTED, lambda _: self._decoded(whole))
        if pixels is not None and (cut := self._cut_job(job, image, pixels)) is not None:
            return [cut]
        return [replace(whole, region=part.box)] if image.there else None

    def _cut_job(self, job: Job, image: OpenedImage, pixels: bytes) -> Job | None:
        """Return the job that resizes a region cropped from `pixels`.

        Returns None if too many bytes of cropped regions are waiting already.
        """
        part = image.frames[0].part
        assert part is not None
        probe = Probe(RAW, image.probe.height, image.probe.width, "RGB", 1, 1)
        nbytes = 3 * probe.height * probe.width
        if self._cut + nbytes > self._held.maxsize:
            return None
        whole = np.frombuffer(pixels, np.uint8).reshape(*part.whole.upright, 3)
        data = encode_array(whole[part.box.slices])
        cut = replace(job, digest=image.image.key.digest, data=data, probe=probe)
        self._cut += nbytes
        # The bytes are uncounted however the job ends: by a result, an error or cancellation.
        weakref.finalize(cut, self._release, nbytes).atexit = False
        return cut

    def _release(self, nbytes: int) -> None:
        self._cut -= nbytes

    def _holds(self, job: Job) -> bool:
        nbytes = 3 * job.pixels
        needed = decoding_bytes(job.probe, len(job.data), [whole_of(job.probe.upright)])
        return nbytes <= min(MAX_RETURNED, self._held.maxsize) and needed <= self._limits.memory

    async def _decoded(self, job: Job) -> bytes:
        """Decode a full image, cache its pixels, and return them.

        Raises ImageError if decoding fails, and EngineUnavailable if the workers fail to start.
        """
        recipe = whole_of(job.probe.upright)
        pixels = await self._pool.decode(replace(job, recipe=recipe, returned=True))
        self._held[job.name] = pixels
        return pixels


def _box(region: ImageRegion, upright: tuple[int, int]) -> Box:
    height, width = upright
    inside = 0 <= region.left < region.right <= width and 0 <= region.top < region.bottom <= height
    if inside:
        return Box(region.top, region.left, region.bottom, region.right)
    given = [region.left, region.top, region.right, region.bottom]
    raise ImageError(
        f"{region.param}: {given} is not inside the image, which is {width} x {height} px: send "
        f"[x0, y0, x1, y1] with 0 <= x0 < x1 <= {width} and 0 <= y0 < y1 <= {height}",
        region.param,
        "invalid_region",
    )


def _name(digest: bytes, box: Box) -> bytes:
    sides = box.left, box.top, box.right, box.bottom
    return blake3(msgspec.msgpack.encode(("saccade region", digest, sides))).digest()
