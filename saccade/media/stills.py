"""Still images: one source is one image, on a canvas of its own."""

from __future__ import annotations

from saccade.core.family import FamilySpec
from saccade.media.content import identify_soon
from saccade.media.opened import Kind, OpenedImage, SeenFrame, jobs_of
from saccade.media.sources.source import DrawnPage, ImageSource
from saccade.media.sources.source_reader import Reads, SourceRead
from saccade.media.workers.decode_queue import Job, PixelLimits


class Stills:
    """Answers `MediaKind` for stills. Pages of documents are drawn as stills."""

    def __init__(self, spec: FamilySpec, limits: PixelLimits) -> None:
        self._spec = spec
        self._limits = limits

    def check(self, source: ImageSource) -> None:
        """Accept every still: a model that sees images sees them all."""

    def begin_reads(self, source: ImageSource, reads: Reads) -> None:
        reads.read_source(source.url)

    async def metadata(self, source: ImageSource, reads: Reads) -> SourceRead:
        return await reads.read_source(source.url)

    async def units(self, source: ImageSource, metadata: SourceRead, reads: Reads) -> OpenedImage:
        encoded, probe, salt = metadata.encoded, metadata.probe, reads.salt
        found = await identify_soon(encoded.digest, probe, source.budget, salt, self._spec)
        self._limits.check(found.recipe.canvas, probe, len(encoded.data), found.recipe)
        if source.uuid:
            reads.reader.remember(salt, source.uuid, metadata)
        frame = SeenFrame(encoded.digest, encoded, probe, found.recipe)
        kind: Kind = "document" if isinstance(source.url, DrawnPage) else "still"
        return OpenedImage(kind, found.image, (frame,), reads.asker, metadata.times, source.budget)

    async def pixels(self, image: OpenedImage) -> list[Job] | None:
        return jobs_of(image) if image.there else None
