"""Documents: PDFs whose pages a model sees as text, as images, or as both.

Owns a page's name, and a file's metadata. These are the pages' sizes, their text, and their
images' names, so that a seen file costs a hash. A page's image is named by its drawing, so the same
page in two files is one image. Metadata are a tenant's own. `page_drawing.py` says how large a page
is drawn, and `document_pool.py` has files read and parsed. Knows nothing of prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, TypeVar

import msgspec
from blake3 import blake3
from cachetools import LRUCache
from msgspec import Meta

from saccade.core.config import MIB
from saccade.core.decoders import msgpack_decoder
from saccade.core.errors import ImageError, InvalidRequest
from saccade.core.extras import ask_operator
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions
from saccade.core.recipe import PageDrawing
from saccade.media.content import Budget, Probe, digest
from saccade.media.metadata_store import LARGEST, MetadataStore
from saccade.media.opened import EncodedBytes, OpenedImage, PageOfFile, jobs_of
from saccade.media.page_drawing import PageSize
from saccade.media.sources.fairness import Requester
from saccade.media.sources.flights import ByteFlight, Flights
from saccade.media.sources.source import DrawnPage, ImageSource, RegionSource, SentFile
from saccade.media.sources.source_reader import Reads
from saccade.media.workers.decode_queue import Job
from saccade.media.workers.document_pool import DocumentBytes, DocumentPool
from saccade.media.workers.fork_server import ForkServers
from saccade.media.workers.worker import PageWanted

T = TypeVar("T")
METADATA_BYTES = 64 * MIB
KIND = "document"
"""Of metadata on disk."""
BEGIN = 1024
"""Bytes among which a PDF says what it is, as readers take it."""
IMAGES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
"""What begins so is an image, whatever its notes say."""
OFFICE = {
    b"PK\x03\x04": "a zip archive, as Word, Excel, PowerPoint and OpenDocument files are",
    b"\xd0\xcf\x11\xe0": "a file of an older Word, Excel or PowerPoint",
    b"{\\rtf": "a rich text file",
}

PageSizes = list[tuple[float, float]]
"""(height, width) of each page in points, upright."""
Side = Annotated[float, Meta(gt=0, le=1e9)]
Name = Annotated[bytes, Meta(min_length=32, max_length=32)]
_SIZES = msgpack_decoder(list[tuple[Side, Side]])
_TEXTS = msgpack_decoder(list[str])
_PAGES = msgpack_decoder(list[tuple[str, bytes]])
_NAMES = msgpack_decoder(list[Name])


@cache
def renderer_version() -> str:
    """Return the version of the PDF reader's distribution, or "" if missing."""
    try:
        return version("pypdfium2")
    except PackageNotFoundError:
        return ""


def has_renderer() -> bool:
    return bool(renderer_version())


@dataclass(frozen=True, slots=True)
class OpenedPage:
    """A page of a document: its text, if wanted, and its image, if wanted. It is page `number` of
    `of`.
    """

    number: int
    of: int
    text: str
    image: DrawnPage | None


@dataclass(frozen=True, slots=True)
class MeasuredFile:
    """A PDF whose pages' sizes are known. `shown` has the places of the wanted pages among `count`.
    `drawn` says of each how it is drawn, or `None` for its text alone. `begun` is when it was
    opened.
    """

    file: EncodedBytes
    budget: Budget
    count: int
    shown: tuple[int, ...]
    drawn: tuple[PageDrawing | None, ...]
    begun: float

    @property
    def images(self) -> int:
        """Count the pages shown as images."""
        return sum(drawing is not None for drawing in self.drawn)


@dataclass(slots=True)
class _Known:
    """The known part of a file's pages. `None` means unknown or unwanted."""

    texts: list[str] | None = None
    names: list[bytes] | None = None
    drawn: dict[int, bytes] = field(default_factory=dict)
    """PNGs, by page."""


class _DocumentMetadata:
    """Metadata in memory, least recently used dropped first, and on disk in pieces."""

    def __init__(self, disk: MetadataStore | None) -> None:
        self._disk = disk
        self._metadata: LRUCache[bytes, bytes] = LRUCache(METADATA_BYTES, len)

    async def find(
        self, name: bytes, form: msgspec.msgpack.Decoder[list[T]], length: int | None = None
    ) -> list[T] | None:
        """Return a list with the given length if known, else `None`."""
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


def _piece(name: bytes, number: int) -> bytes:
    return name + number.to_bytes(4)


class Documents:
    """All documents of one server, answering `MediaKind`. It shows pages, which become images
    later.
    """

    def __init__(
        self,
        spec: FamilySpec,
        options: MediaOptions,
        metrics: Metrics,
        disk: MetadataStore | None,
        fork_servers: ForkServers | None = None,
    ) -> None:
        """Open the documents' metadata. `disk` is where metadata outlives the server, if any."""
        self._spec = spec
        self._options = options
        self._metrics = metrics
        self._pool = DocumentPool(options, metrics, fork_servers)
        self._metadata = _DocumentMetadata(disk)
        self._flights = Flights()

    async def close(self) -> None:
        await self._flights.close()
        await self._pool.close()

    def takes(self, data: bytes, param: str) -> bool:
        """Return True for a PDF.

        Raises InvalidRequest for an unreadable PDF, and for documents in other formats.
        """
        if b"%PDF-" not in data[:BEGIN] or data.startswith(IMAGES):
            kind = next((kind for start, kind in OFFICE.items() if data.startswith(start)), None)
            if kind is None:
                return False
            raise InvalidRequest(
                f"{param}: the file is {kind}: convert to PDF, and send that",
                param,
                "unsupported_document",
            )
        if not has_renderer():
            raise InvalidRequest(
                f"{param}: the file is a PDF, and this server has nothing to read it with: send "
                f"its pages as images, or {ask_operator('documents')}",
                param,
                "no_document_reader",
            )
        return True

    def check(self, source: SentFile) -> None:
        """Accept every file, since only its bytes show what it is."""

    def begin_reads(self, source: SentFile, reads: Reads) -> None:
        reads.fetch(source.url)

    async def metadata(self, source: SentFile, reads: Reads) -> MeasuredFile | ImageSource:
        """Measure the pages of a PDF before any is read. Any other file is returned as an image.

        Raises ImageError, EngineUnavailable.
        """
        file = (await reads.fetch(source.url)).encoded
        if not self.takes(file.data, source.param):
            if source.page is not None:
                raise InvalidRequest(
                    f"{source.param}: page is given, and the file is an image: leave page out",
                    source.param,
                )
            if source.region is not None:
                return RegionSource(file.data, source.param, source.budget, region=source.region)
            return ImageSource(file.data, source.param, source.budget)
        self._metrics.inc("saccade_documents_opened_total")
        begun = time.monotonic()
        sizes = await self._sizes(file, reads.salt, reads.asker)
        shown = _places(source.view.pages, len(sizes))
        if len(shown) > (most := self._options.max_pages):
            raise ImageError(
                f"the request shows {len(shown)} pages; the limit is {most}: choose fewer with "
                '"pages", or start the server with a larger --tune max_pages=PAGES',
                code="too_many_pages",
            )
        if source.region is not None and len(shown) > 1:
            raise InvalidRequest(
                f"{source.region.param}: the PDF has {len(sizes)} pages: name the region's with "
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

    async def check_file(self, file: EncodedBytes, salt: str, asker: Requester) -> PageSizes:
        """Check that a request could name this PDF, and return its pages' sizes.

        Raises ImageError if the PDF is refused, EngineUnavailable.
        """
        return await self._sizes(file, salt, asker)

    async def units(
        self, source: SentFile, metadata: MeasuredFile | ImageSource, reads: Reads
    ) -> tuple[OpenedPage, ...] | ImageSource:
        """Read the pages of a PDF.

        Raises as `metadata`, and Overloaded if the budget for drawings is used up.
        """
        if isinstance(metadata, ImageSource):
            return metadata
        file, drawn, begun = metadata.file, metadata.drawn, metadata.begun
        known = await self._known(metadata, source.view.has_text, reads.salt, reads.asker)
        pages = []
        for place, (index, drawing) in enumerate(zip(metadata.shown, drawn, strict=True)):
            image = None
            if drawing is not None and known.names is not None:
                page = PageOfFile(file, index, drawing)
                encoded = EncodedBytes(known.drawn.get(place, b""), known.names[place], page)
                image = DrawnPage(encoded, Probe("PNG", *drawing.kept, "RGB", 1, 1), begun)
            text = "" if known.texts is None else known.texts[place]
            pages.append(OpenedPage(index + 1, metadata.count, text, image))
        if source.view.shown == "text" and not any(page.text for page in pages):
            raise ImageError(
                'the PDF has no text, as scans have none: ask with documents "images" or "both"',
                code="no_text",
            )
        return tuple(pages)

    async def pixels(self, image: OpenedImage) -> list[Job] | None:
        """Draw the page again if its bytes are gone. Raises ImageError."""
        page = image.encoded.page
        if image.there or page is None:
            return jobs_of(image) if image.there else None
        file = DocumentBytes(page.file.digest, page.file.data, image.asker)
        ((_, png),) = await self._pool.pages(file, [PageWanted(page.index, page.drawing, False)])
        if digest(png) != image.encoded.digest:
            raise ImageError("a page of the PDF is not drawn as it was before: send it again")
        encoded = replace(image.encoded, data=png)
        return jobs_of(replace(image, frames=(replace(image.frames[0], encoded=encoded),)))

    # ---- what is known of a file

    async def _sizes(self, file: EncodedBytes, salt: str, asker: Requester) -> PageSizes:
        name = _metadata_name("sizes", file.digest, salt)
        if (sizes := await self._metadata.find(name, _SIZES)) is None:

            async def measure(_: ByteFlight) -> bytes:
                bytes_of = DocumentBytes(file.digest, file.data, asker)
                found = await self._pool.sizes(bytes_of)
                self._metadata.put(name, found)
                return msgspec.msgpack.encode(found)

            sizes = _SIZES.decode(await self._flights.join(name, asker, measure))
        return sizes

    async def _known(
        self, measured: MeasuredFile, texts: bool, salt: str, asker: Requester
    ) -> _Known:
        """Find texts, and names of pages drawn as they are here, in metadata as far as known.

        What is known of some pages stands apart from what is known of all.
        """
        file, drawn = measured.file, measured.drawn
        some = () if measured.shown == tuple(range(measured.count)) else (measured.shown,)
        of_texts = _metadata_name("texts", file.digest, salt, _packed(*some))
        ways = [each and _way(each) for each in drawn]
        of_names = _metadata_name("names", file.digest, salt, _packed(ways, *some))
        shows = drawn[0] is not None
        known = _Known(
            await self._metadata.find(of_texts, _TEXTS, len(drawn)) if texts else None,
            await self._metadata.find(of_names, _NAMES, len(drawn)) if shows else None,
        )
        ask_text, ask_names = texts and known.texts is None, shows and known.names is None
        if not (ask_text or ask_names):
            return known
        wanted = [
            PageWanted(index, drawing if ask_names else None, ask_text)
            for index, drawing in zip(measured.shown, drawn, strict=True)
        ]

        async def read(flight: ByteFlight) -> bytes:
            bytes_of = DocumentBytes(file.digest, file.data, asker)
            return msgspec.msgpack.encode(await self._pool.pages(bytes_of, wanted, flight.grow))

        flight = of_texts, of_names, ask_text, ask_names
        found = _PAGES.decode(await self._flights.join(flight, asker, read))
        if ask_text:
            known.texts = [text for text, _ in found]
            self._metadata.put(of_texts, known.texts)
        if ask_names:
            known.drawn = {index: png for index, (_, png) in enumerate(found)}
            known.names = [blake3(png).digest() for _, png in found]
            self._metadata.put(of_names, known.names)
        return known


def _places(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the places of the wanted pages, or of all. Raises ImageError for a missing page."""
    for number in numbers:
        if number > count:
            pages = f"{count} page{'s' * (count != 1)}"
            raise ImageError(
                f"page {number} is asked for, and the PDF has {pages}", code="no_such_page"
            )
    return tuple(number - 1 for number in numbers) or tuple(range(count))


def _way(drawing: PageDrawing) -> Sequence[object]:
    """Return how a page is drawn, as its metadata's name has it. Whole pages are named by size."""
    box = drawing.box
    return drawing.size if box is None else (drawing.size, (box.top, box.left, *drawing.kept))


def _packed(*facts: object) -> bytes:
    return b"".join(map(msgspec.msgpack.encode, facts))


def _metadata_name(kind: str, file: bytes, salt: str, more: bytes = b"") -> bytes:
    """Name the metadata for a known part of the file with this digest. `more` is the way of
    drawing.
    """
    facts = msgspec.msgpack.encode(("saccade page", kind, renderer_version(), salt, file, more))
    return blake3(facts).digest()
