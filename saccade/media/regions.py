"""Regions: parts of still images, cut at full detail and then seen as images of their own.

Owns a region's name and its bounds. Knows nothing of where an image's bytes come from.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from blake3 import blake3

from saccade.core.errors import ImageError
from saccade.core.family import FamilySpec
from saccade.core.recipe import Box
from saccade.media.content import identify_soon
from saccade.media.opened import OpenedImage, PartOfImage, SeenFrame, jobs_of
from saccade.media.sources.source import ImageRegion, RegionSource
from saccade.media.sources.source_reader import Reads, SourceRead
from saccade.media.stills import Stills
from saccade.media.workers.decode_queue import Job, PixelLimits


class Regions:
    """Answers `MediaKind` for regions. One that shows all of an image is the image, of `stills`."""

    def __init__(self, spec: FamilySpec, limits: PixelLimits, stills: Stills) -> None:
        self._spec = spec
        self._limits = limits
        self._stills = stills

    def check(self, source: RegionSource) -> None:
        """Accept every region: a model that sees images sees their parts."""

    def begin_reads(self, source: RegionSource, reads: Reads) -> None:
        reads.read_source(source.url)

    async def metadata(self, source: RegionSource, reads: Reads) -> SourceRead:
        return await reads.read_source(source.url)

    async def units(self, source: RegionSource, metadata: SourceRead, reads: Reads) -> OpenedImage:
        encoded, whole, salt = metadata.encoded, metadata.probe, reads.salt
        box = _box(source.region, whole.upright)
        height, width = box.bottom - box.top, box.right - box.left
        if (height, width) == whole.upright:
            return await self._stills.units(source, metadata, reads)
        probe = replace(whole, height=height, width=width, orientation=1)
        name = _name(encoded.digest, box)
        found = await identify_soon(name, probe, source.budget, salt, self._spec)
        self._limits.check(found.recipe.canvas, whole, len(encoded.data), found.recipe)
        if source.uuid:
            reads.reader.remember(salt, source.uuid, metadata)
        part = PartOfImage(whole, box)
        frame = SeenFrame(name, encoded, probe, found.recipe, part=part)
        return OpenedImage("region", found.image, (frame,), reads.asker, metadata.times)

    async def pixels(self, image: OpenedImage) -> list[Job] | None:
        """Return the decode of the whole image, of which its part alone is resized."""
        part = image.frames[0].part
        assert part is not None
        if not image.there:
            return None
        return [replace(job, probe=part.whole, region=part.box) for job in jobs_of(image)]


def _box(region: ImageRegion, upright: tuple[int, int]) -> Box:
    """Return a region's pixels. Raises ImageError unless it lies within the image."""
    height, width = upright
    inside = 0 <= region.left < region.right <= width and 0 <= region.top < region.bottom <= height
    if inside:
        return Box(region.top, region.left, region.bottom, region.right)
    given = [region.left, region.top, region.right, region.bottom]
    raise ImageError(
        f"{region.param}: {given} is no part of the image, which is {width} x {height} px: send "
        f"[x0, y0, x1, y1] with 0 <= x0 < x1 <= {width} and 0 <= y0 < y1 <= {height}",
        region.param,
        "invalid_region",
    )


def _name(digest: bytes, box: Box) -> bytes:
    """Name a part of the image with this digest."""
    sides = box.left, box.top, box.right, box.bottom
    return blake3(msgspec.msgpack.encode(("saccade region", digest, sides))).digest()
