"""Documents: PDFs whose pages a model sees as text, as images, or both.

The server caches the metadata of files (the sizes of pages, their text, and the hashes of their
images), so that a repeated file costs only a hash. The image of a page is identified by the hash of
its pixels, so the same page in two files is one image. Metadata are not shared between tenants.
`page_drawing.py` decides the size at which a page is drawn, and `document_pool.py` reads files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeVar

import msgspec
from blake3 import blake3
from cachetools import LRUCache
from msgspec import Meta

from saccade.core.config import MIB
from saccade.core.decoders import msgpack_decoder
from saccade.core.errors import ImageError, InvalidRequest
from saccade.core.extras import ask_operator
from saccade.core.recipe import PageDrawing
from saccade.core.settings import DraftSettings
from saccade.media.content import Probe, digest
from saccade.media.kind import HEAD_BYTES, KindContext
from saccade.media.metadata_store import LARGEST, MetadataStore
from saccade.media.opened import EncodedBytes, OpenedImage, PageOfFile, jobs_of
from saccade.media.sent_files import MeasuredFile, OpenedPage, PageSizes
from saccade.media.sources.fairness import Requester
from saccade.media.sources.single_flight import ByteFlight, SingleFlight
from saccade.media.sources.source import RenderedPage, SentFile
from saccade.media.sources.source_reader import Reads
from saccade.media.workers.decode_queue import Job
from saccade.media.workers.orders import PageWanted
from saccade.plugins.documents import has_renderer, renderer_version
from saccade.plugins.documents.document_pool import DocumentBytes, DocumentPool
from saccade.plugins.documents.options import PdfOptions
from saccade.plugins.documents.page_drawing import PageSize

T = TypeVar("T")
METADATA_BYTES = 64 * MIB
KIND = "document"
"""The type of document metadata in the metadata store on disk."""
PDF = b"%PDF-"
OFFICE = {
    b"PK\x03\x04": "a zip archive, as Word, Excel, PowerPoint and OpenDocument files are",
    b"\xd0\xcf\x11\xe0": "a file of an older Word, Excel or PowerPoint",
    b"{\\rtf": "a rich text file",
}

DRAFT_PAGES = 4
"""Maximum pages of a PDF whose text is read only for draft tokens."""
Texts = Literal["", "short", "whole"]
"""Which text of pages to read: none, texts that are short enough for draft tokens, or all."""

Side = Annotated[float, Meta(gt=0, le=1e9)]
Name = Annotated[bytes, Meta(min_length=32, max_length=32)]
_SIZES = msgpack_decoder(list[tuple[Side, Side]])
_TEXTS = msgpack_decoder(list[str])
_PAGES = msgpack_decoder(list[tuple[str, bytes]])
_NAMES = msgpack_decoder(list[Name])


@dataclass(slots=True)
class _Known:
    """Cached metadata of a file's pages. A field is `None` if it is unknown or was not
    requested.
    """

    texts: list[str] | None = None
    names: list[bytes] | None = None
    drawn: dict[int, bytes] = field(default_factory=dict)
    """PNGs of drawn pages, by index among the requested pages."""


class _DocumentMetadata:
    """Caches metadata of documents in memory (LRU), and on disk in chunks."""

    def __init__(self, disk: MetadataStore | None) -> None:
        self._disk = disk
        self._metadata: LRUCache[bytes, bytes] = LRUCache(METADATA_BYTES, len)

    async def find(
        self, name: bytes, form: msgspec.msgpack.Decoder[list[T]], length: int | None = None
    ) -> list[T] | None:
        """Return the cached list with this name, or None if it is unknown or its length is not
        `length`.

        form: decodes the list.
        """
        packed = self._metadata.get(name)
        if packed is None and self._disk:
            packed = await self._read(self._disk, name)
        if packed is None:
            return None
        try:
            found = form.decode(packed)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if not found or length not in (None, len(found)):
            return None
        if name not in self._metadata:
            self._keep(name, packed)
        return found

    def put(self, name: bytes, metadata: Sequence[object]) -> None:
        packed = msgspec.msgpack.encode(metadata)
        self._keep(name, packed)
        if self._disk is None:
            return
        whole = len(packed).to_bytes(8) + packed
        for number, at in enumerate(range(0, len(whole), LARGEST)):
            self._disk.put(KIND, _piece(name, number), whole[at : at + LARGEST])

    def _keep(self, name: bytes, packed: bytes) -> None:
        if len(packed) <= METADATA_BYTES:
            self._metadata[name] = packed

    async def _read(self, disk: MetadataStore, name: bytes) -> bytes | None:
        whole = b""
        for number in range(METADATA_BYTES // LARGEST):
            piece = await disk.find(KIND, _piece(name, number))
            if not piece:
                return None
            whole += piece
            if len(whole) >= 8 + int.from_bytes(whole[:8]):
                return whole[8:]
        return None


def _check_readable(data: bytes, param: str) -> None:
    """Raise InvalidRequest if the data is a PDF and no reader is installed, or another type of
    document.
    """
    kind = next((kind for start, kind in OFFICE.items() if data.startswith(start)), None)
    if kind is not None and PDF not in data[:HEAD_BYTES]:
        raise InvalidRequest(
            f"{param}: the file is {kind}: convert it to PDF, and send the PDF",
            param,
            "unsupported_document",
        )
    if not has_renderer():
        raise InvalidRequest(
            f"{param}: the file is a PDF, and this server cannot read it: send its pages as images"
            f", or {ask_operator('documents')}",
            param,
            "no_document_reader",
        )


def _piece(name: bytes, number: int) -> bytes:
    return name + number.to_bytes(4)


class Documents:
    """Reads all documents of a server. Implements `MediaKind`.

    Their pages are later handled as images.
    """

    def __init__(self, context: KindContext) -> None:
        """Create the cache of metadata. It is also stored on disk if the server has a metadata
        store.
        """
        self._spec = context.spec
        self._max_pages = context.options.of(PdfOptions).max_pages
        self._drafts = context.options.of(DraftSettings).speculative != "off"
        self._metrics = context.metrics
        self._pool = DocumentPool(
            context.options.media, self._max_pages, context.metrics, context.fork_servers
        )
        self._metadata = _DocumentMetadata(context.disk)
        self._flights = SingleFlight()

    def forget(self) -> None:
        """Do nothing, since no pixels are cached."""

    async def close(self) -> None:
        await self._flights.close()
        await self._pool.close()

    def check(self, source: SentFile) -> None:
        """Accept any file, since its type is only known from its bytes."""

    def begin_reads(self, source: SentFile, reads: Reads) -> None:
        reads.fetch(source.url)

    async def metadata(self, source: SentFile, reads: Reads) -> MeasuredFile:
        """Measure the pages of a PDF, before any is read.

        Raises ImageError and EngineUnavailable, and InvalidRequest for an unreadable PDF or another
        type of document.
        """
        file = (await reads.fetch(source.url)).encoded
        _check_readable(file.data, source.param)
        self._metrics.inc("saccade_documents_opened_total")
        begun = time.monotonic()
        sizes = await self._sizes(file, reads.salt, reads.requester)
        shown = _places(source.view.pages, len(sizes))
        if len(shown) > (most := self._max_pages):
            raise ImageError(
                f"the request contains {len(shown)} pages; the limit is {most}: choose fewer with "
                '"pages", or start the server with a larger --tune max_pages=PAGES',
                code="too_many_pages",
            )
        if source.region is not None and len(shown) > 1:
            raise InvalidRequest(
                f"{source.region.param}: the PDF has {len(sizes)} pages: set page to the region's "
                "page, counted from 1",
                source.region.param,
            )
        drawn = tuple(
            PageSize(index + 1, *sizes[index]).draw(self._spec, source.budget, source.region)
            if source.view.has_images
            else None
            for index in shown
        )
        return MeasuredFile(file, source.budget, len(sizes), shown, drawn, begun)

    async def sizes(self, source: SentFile, reads: Reads) -> PageSizes:
        """Check that a request may use this PDF, and return the sizes of its pages.

        Raises ImageError and EngineUnavailable, and InvalidRequest for an unreadable PDF or another
        type of document.
        """
        file = (await reads.fetch(source.url)).encoded
        _check_readable(file.data, source.param)
        return await self._sizes(file, reads.salt, reads.requester)

    async def units(
        self, source: SentFile, metadata: MeasuredFile, reads: Reads
    ) -> tuple[OpenedPage, ...]:
        """Read the pages of a PDF.

        If the model sees only the images of a few pages, their text is read as well, because an
        answer that transcribes them can be drafted from it.

        Raises ImageError, EngineUnavailable, InvalidRequest for an unreadable PDF, and Overloaded
        if the memory budget for drawings is used up.
        """
        file, drawn, begun = metadata.file, metadata.drawn, metadata.begun
        few = source.region is None and len(drawn) <= DRAFT_PAGES
        texts: Texts = "whole" if source.view.has_text else "short" if few and self._drafts else ""
        known = await self._known(metadata, texts, reads.salt, reads.requester)
        pages = []
        for place, (index, drawing) in enumerate(zip(metadata.shown, drawn, strict=True)):
            image = None
            if drawing is not None and known.names is not None:
                page = PageOfFile(file, index, drawing)
                encoded = EncodedBytes(known.drawn.get(place, b""), known.names[place], page)
                image = RenderedPage(encoded, Probe("PNG", *drawing.kept, "RGB", 1, 1), begun)
            text = "" if known.texts is None else known.texts[place]
            pages.append(OpenedPage(index + 1, metadata.count, text, image))
        if source.view.shown == "text" and not any(page.text for page in pages):
            raise ImageError(
                "the PDF has no text, for example because it is a scan: set documents to "
                '"images" or "both"',
                code="no_text",
            )
        return tuple(pages)

    async def pixels(self, image: OpenedImage) -> list[Job] | None:
        """Return the decode jobs of a page's image, or None if its bytes are gone. A page whose PNG
        was freed is drawn again.

        Raises ImageError if the new drawing differs.
        """
        page = image.encoded.page
        if image.there or page is None:
            return jobs_of(image) if image.there else None
        file = DocumentBytes(page.file.digest, page.file.data, image.requester)
        ((_, png),) = await self._pool.pages(file, [PageWanted(page.index, page.drawing, False)])
        if digest(png) != image.encoded.digest:
            raise ImageError("a page of the PDF is rendered differently than before: send it again")
        encoded = replace(image.encoded, data=png)
        return jobs_of(replace(image, frames=(replace(image.frames[0], encoded=encoded),)))

    # ---- metadata of a file

    async def _sizes(self, file: EncodedBytes, salt: str, requester: Requester) -> PageSizes:
        name = _metadata_name("sizes", file.digest, salt)
        if (sizes := await self._metadata.find(name, _SIZES)) is None:

            async def measure(_: ByteFlight) -> bytes:
                bytes_of = DocumentBytes(file.digest, file.data, requester)
                found = await self._pool.sizes(bytes_of)
                self._metadata.put(name, found)
                return msgspec.msgpack.encode(found)

            sizes = _SIZES.decode(await self._flights.join(name, requester, measure))
        return sizes

    async def _known(
        self, measured: MeasuredFile, texts: Texts, salt: str, requester: Requester
    ) -> _Known:
        """Return the texts of pages, and the hashes of pages drawn in this way.

        Metadata of a selection of pages are stored separately from metadata of all pages.
        """
        file, drawn = measured.file, measured.drawn
        some = () if measured.shown == tuple(range(measured.count)) else (measured.shown,)
        kind = "short texts" if texts == "short" else "texts"
        of_texts = _metadata_name(kind, file.digest, salt, _packed(*some))
        ways = [each and _way(each) for each in drawn]
        of_names = _metadata_name("names", file.digest, salt, _packed(ways, *some))
        shows = drawn[0] is not None
        known = _Known(
            await self._metadata.find(of_texts, _TEXTS, len(drawn)) if texts else None,
            await self._metadata.find(of_names, _NAMES, len(drawn)) if shows else None,
        )
        ask_text, ask_names = bool(texts) and known.texts is None, shows and known.names is None
        if not (ask_text or ask_names):
            return known
        wanted = [
            PageWanted(index, drawing if ask_names else None, ask_text, texts == "short")
            for index, drawing in zip(measured.shown, drawn, strict=True)
        ]

        async def read(flight: ByteFlight) -> bytes:
            bytes_of = DocumentBytes(file.digest, file.data, requester)
            return msgspec.msgpack.encode(await self._pool.pages(bytes_of, wanted, flight.grow))

        flight = of_texts, of_names, ask_text, ask_names
        found = _PAGES.decode(await self._flights.join(flight, requester, read))
        if ask_text:
            known.texts = [text for text, _ in found]
            self._metadata.put(of_texts, known.texts)
        if ask_names:
            known.drawn = {index: png for index, (_, png) in enumerate(found)}
            known.names = [blake3(png).digest() for _, png in found]
            self._metadata.put(of_names, known.names)
        return known


def _places(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the indices of the requested pages, by default of all. Raises ImageError if the file
    lacks one.
    """
    for number in numbers:
        if number > count:
            pages = f"{count} page{'s' * (count != 1)}"
            raise ImageError(
                f"page {number} was requested, but the PDF has {pages}", code="no_such_page"
            )
    return tuple(number - 1 for number in numbers) or tuple(range(count))


def _way(drawing: PageDrawing) -> Sequence[object]:
    """Return the values that identify how a page is drawn: its size, and its region if it has one.

    They are part of the metadata's cache key.
    """
    box = drawing.box
    return drawing.size if box is None else (drawing.size, (box.top, box.left, *drawing.kept))


def _packed(*facts: object) -> bytes:
    return b"".join(map(msgspec.msgpack.encode, facts))


def _metadata_name(kind: str, file: bytes, salt: str, more: bytes = b"") -> bytes:
    """Return the cache key of metadata for the file with this digest.

    kind: the type of metadata.
    more: how pages are drawn.
    """
    facts = msgspec.msgpack.encode(("saccade page", kind, renderer_version(), salt, file, more))
    return blake3(facts).digest()
