"""Opens files in requests. Their bytes determine whether they are images or documents with
pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from saccade.core.client import ANYBODY, Client
from saccade.core.errors import InvalidRequest
from saccade.core.recipe import PageDrawing
from saccade.media.content import Budget, digest, looks_like_video
from saccade.media.kind import MediaKind
from saccade.media.media import ERRORS, Media, at
from saccade.media.opened import EncodedBytes
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import (
    ImageSource,
    RegionSource,
    RenderedPage,
    SentFile,
    VideoSource,
    beside,
)
from saccade.media.sources.source_reader import Reads, all_of

PageSizes = list[tuple[float, float]]
"""(height, width) of each page in points, upright."""


@dataclass(frozen=True, slots=True)
class OpenedPage:
    """A page of a document that the model sees, as text, as an image or both."""

    number: int  # starting at 1
    of: int  # pages in the document
    text: str  # empty if it was not read
    image: RenderedPage | None  # `None` if the image was not requested


@dataclass(frozen=True, slots=True)
class MeasuredFile:
    """A document whose page sizes have been read."""

    file: EncodedBytes
    budget: Budget
    count: int  # pages in the document
    shown: tuple[int, ...]  # indices of the requested pages
    drawn: tuple[PageDrawing | None, ...]  # how to render each of these; `None` shows text only
    begun: float  # `time.monotonic()` when it was opened

    @property
    def images(self) -> int:
        """The number of pages that the model sees as images."""
        return sum(drawing is not None for drawing in self.drawn)


class FileKind(MediaKind[SentFile, MeasuredFile, tuple[OpenedPage, ...]], Protocol):
    """A kind of media whose files have pages."""

    async def sizes(self, source: SentFile, reads: Reads) -> PageSizes:
        """Return the sizes of all pages.

        Raises ImageError, TooLarge or NotFound if the file cannot be fetched or read,
        InvalidRequest for an unreadable or unsupported document, and EngineUnavailable.
        """
        ...


class SentFiles:
    """Opens the files in requests as images or as pages of documents."""

    def __init__(self, media: Media) -> None:
        self._media = media

    async def open(
        self,
        sources: Sequence[SentFile],
        salt: str,
        requester: Requester,
        others: int = 0,
        fits: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> list[tuple[OpenedPage, ...] | ImageSource]:
        """Return the pages of each file, or an `ImageSource` for a file that is an image.

        A file that occurs more than once is read once. Raises ImageError, TooLarge, NotFound or
        Overloaded, as `Media.open` does, and the exceptions of `fits`. Damaged images are only
        detected when their source is opened.

        others: the number of other images in the prompt, which may reduce the budget of each page.
        fits: called with the number of image tokens of each file before pages are read. It may
            raise.
        """
        media = self._media
        media.check_count(len(sources), sources[-1].param)
        if not media.spec.sees_images:
            for source in (each for each in sources if each.view.has_images):
                media.check_seen(source.param)
        reads = Reads(media.reader, salt, requester)
        for source in sources:
            reads.fetch(source.url)
        measuring = [asyncio.create_task(self._measure(source, reads)) for source in sources]
        measured = await all_of(measuring, reads)
        others += sum(isinstance(found, ImageSource) for found in measured)
        documents = [found for found in measured if isinstance(found, MeasuredFile)]
        images = others + sum(found.images for found in documents)
        media.check_count(images, sources[-1].param)
        fits([self._tokens(found, images) for found in measured])
        opening = [
            asyncio.create_task(self._show(source, metadata, reads))
            for source, metadata in zip(sources, measured, strict=True)
        ]
        return await all_of(opening, ())

    async def check(self, data: bytes, param: str, client: Client = ANYBODY) -> PageSizes | None:
        """Check that this client can use these bytes as an image, a video or a document.

        Returns the page sizes of a document, or None for an image or a video. Raises
        InvalidRequest, ImageError or TooLarge if the bytes cannot be used.
        """
        media, requester = self._media, Requester.of(client)
        try:
            media.reader.inline.check_size(len(data))
            if (kind := self._kind_of(data)) is not None:
                reads = Reads(media.reader, client.salt(""), requester)
                return await kind.sizes(SentFile(data, param), reads)
            media.check_seen(param)
            if video := looks_like_video(data) and media.spec.video is not None:
                source = VideoSource(data, param)
                media.kinds.of(source).check(source)
            name = await asyncio.to_thread(digest, data)
            await media.reader.header(name, data, requester, video)
            return None
        except ERRORS as error:
            raise at(error, param) from error

    def _kind_of(self, data: bytes) -> FileKind | None:
        name = self._media.kinds.of_bytes(data)
        return None if name is None else cast(FileKind, self._media.kinds[name])

    async def _measure(self, source: SentFile, reads: Reads) -> MeasuredFile | ImageSource:
        try:
            data = (await reads.fetch(source.url)).encoded.data
            if (kind := self._kind_of(data)) is not None:
                return await kind.metadata(source, reads)
            return _image_in(data, source)
        except ERRORS as error:
            raise at(error, source.param) from error

    async def _show(
        self, source: SentFile, metadata: MeasuredFile | ImageSource, reads: Reads
    ) -> tuple[OpenedPage, ...] | ImageSource:
        if isinstance(metadata, ImageSource):
            return metadata
        kind = self._kind_of(metadata.file.data)
        assert kind is not None
        try:
            return await kind.units(source, metadata, reads)
        except ERRORS as error:
            raise at(error, source.param) from error

    def _tokens(self, found: MeasuredFile | ImageSource, images: int) -> int:
        if isinstance(found, ImageSource) or not found.images:
            return 0
        spec = self._media.spec
        bounds = beside(found.budget, images, spec.pixel_bounds).apply(spec.pixel_bounds)
        drawn = (each.kept for each in found.drawn if each is not None)
        recipes = (spec.recipe(*size, bounds) for size in drawn)
        return sum(spec.num_tokens(recipe.grid) for recipe in recipes)


def _image_in(data: bytes, source: SentFile) -> ImageSource:
    """Return the source of a file that is an image.

    Raises InvalidRequest if a page was requested.
    """
    if source.page is not None:
        raise InvalidRequest(
            f"{source.param}: page is set, but the file is an image: omit page",
            source.param,
        )
    if source.region is not None:
        return RegionSource(data, source.param, source.budget, region=source.region)
    return ImageSource(data, source.param, source.budget)
