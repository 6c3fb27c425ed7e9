"""PDFs that mean harm: limits hold, nothing is opened, every answer is typed, and the workers that
read them go on.
"""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path as Folder
from typing import Any

import psutil
import pytest

from saccade.core.config import WHOLE_DOCUMENT, DocumentView
from saccade.core.errors import EngineUnavailable, ImageError, Overloaded
from saccade.core.metrics import Metrics
from saccade.core.recipe import Box, PageDrawing
from saccade.media.content import Budget, digest
from saccade.media.formats.pdf import MAX_SHORT_TEXT
from saccade.media.metadata_store import LARGEST
from saccade.media.sent_files import OpenedPage, SentFiles
from saccade.media.sources.fairness import BOUNDLESS, Boundless, MemoryBudget, Requester, Turns
from saccade.media.sources.source import SentFile
from saccade.media.workers.orders import Order, PageWanted, ReadDocument
from saccade.media.workers.worker_slots import WorkerSlot, WorkerSlots
from saccade.plugins.documents import document_pool
from saccade.plugins.documents.document_pool import DocumentBytes, DocumentPool
from saccade.plugins.documents.documents import DRAFT_PAGES
from saccade.plugins.documents.options import PdfOptions
from saccade_bench.attacks.documents import masked, nested
from saccade_bench.fixtures.pdf import Sheet, assembled, pdf, stream
from tests.fixtures.tiny import picture
from tests.helpers.fork_servers import image_fork_servers
from tests.helpers.options import serve_options
from tests.media.conftest import MakePath, Path

GOOD = pdf([Sheet(["the quick brown fox"], picture(40, 60, 3)), Sheet(["two"])])
RENDERED = "saccade_pages_rendered_total"
CATALOG = b"<< /Type /Catalog /Pages 2 0 R >>"
KIDS = b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"


@asynccontextmanager
async def pool(metrics: Metrics | None = None, **options: object) -> AsyncIterator[DocumentPool]:
    told = serve_options(**{"media_workers": 1, "decode_timeout": 6.0, **options})
    most = told.of(PdfOptions).max_pages
    made = DocumentPool(told.media, most, metrics or Metrics(), image_fork_servers())
    try:
        yield made
    finally:
        await made.close()


@contextmanager
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Order]]:
    """The orders that image workers get meanwhile."""
    sent: list[Order] = []
    send = WorkerSlots.send

    def counted(slots: WorkerSlots, slot: WorkerSlot, order: Order) -> None:
        sent.append(order)
        send(slots, slot, order)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerSlots, "send", counted)
        yield sent


async def read(reader: DocumentPool, data: bytes) -> str:
    """What comes of a file: "read", or the code of its refusal; anything else is a failure."""
    file = DocumentBytes(digest(data), data)
    try:
        sizes = await reader.sizes(file)
        assert 1 <= len(sizes) <= 200
        wanted = [
            PageWanted(index, PageDrawing((64, 64)), text=True)
            for index in range(min(3, len(sizes)))
        ]
        for text, png in await reader.pages(file, wanted):
            assert isinstance(text, str) and png.startswith(b"\x89PNG")
    except ImageError as error:
        assert error.message and error.code
        return error.code
    return "read"


def page(contents: bytes, more: str = "", others: Mapping[int, bytes] | None = None) -> bytes:
    """A page that is drawn by `contents`, with other objects from 5 on."""
    told = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Contents 4 0 R {more} >>"
    objects = {1: CATALOG, 2: KIDS, 3: told.encode(), 4: stream(contents), **(others or {})}
    return assembled(objects)


def image(form: str, data: bytes) -> bytes:
    """A page with an image of that form."""
    head = f"/Type /XObject /Subtype /Image {form}"
    more = "/Resources << /XObject << /I 5 0 R >> >>"
    return page(b"99 0 0 99 0 0 cm /I Do", more, {5: stream(data, head)})


def endless() -> bytes:
    """A page that takes a processor seconds and little memory: a program is run for each pixel."""
    program = b"{" + b"dup pop " * 500_000 + b"2 copy}"
    shade = "/ShadingType 1 /ColorSpace /DeviceRGB /Matrix [99 0 0 99 0 0] /Function 6 0 R"
    others = {
        5: f"<< {shade} >>".encode(),
        6: stream(program, "/FunctionType 4 /Domain [0 1 0 1] /Range [0 1 0 1 0 1]"),
    }
    return page(b"/S sh", "/Resources << /Shading << /S 5 0 R >> >>", others)


def deflated(mebibytes: int) -> bytes:
    """As many zeros, deflated twice; the first time one mebibyte stands for each."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    adler = ((mebibytes << 20) % 65521 << 16 | 1).to_bytes(4, "big")
    return zlib.compress(b"\x78\xda" + block * mebibytes + packer.flush() + adler, 9)


def test_zeros_that_are_deflated_twice_are_these_zeros() -> None:
    assert zlib.decompress(zlib.decompress(deflated(64))) == bytes(64 << 20)


RGB = "/ColorSpace /DeviceRGB /BitsPerComponent 8"
HUGE = "/Width 60000 /Height 60000"


def million_pages() -> bytes:
    return assembled({1: CATALOG, 2: b"<< /Type /Pages /Kids [3 0 R] /Count 1000000 >>", 3: KIDS})


def circle() -> bytes:
    """Pages that are their own children, and a form that draws itself."""
    objects = {1: CATALOG, 2: b"<< /Type /Pages /Kids [2 0 R 2 0 R 3 0 R] /Count 3 >>"}
    told = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R"
    form = "/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /F 4 0 R >> >>"
    objects[3] = f"{told} /Resources << /XObject << /F 4 0 R >> >> >>".encode()
    objects[4] = stream(b"/F Do /F Do /F Do", form)
    return assembled(objects)


def own_length() -> bytes:
    """A stream whose length is the stream itself."""
    objects = {1: CATALOG, 2: KIDS, 4: b"<< /Length 4 0 R >>\nstream\nq Q\nendstream"}
    objects[3] = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>"
    return assembled(objects)


def actions() -> bytes:
    """JavaScript and programs to be started at opening, a file within, another file's content."""
    script = "<< /S /JavaScript /JS (app.alert\\(1\\); while \\(true\\) {}) >>"
    catalog = (
        f"<< /Type /Catalog /Pages 2 0 R /OpenAction {script} /AA << /O {script} >> "
        "/Names << /EmbeddedFiles << /Names [(a) 6 0 R] >> /JavaScript << /Names [(b) 7 0 R] >> >> "
        "/AcroForm << /Fields [8 0 R] /XFA 5 0 R >> >>"
    )
    objects = {1: catalog.encode(), 2: KIDS}
    objects[3] = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Annots [8 0 R 9 0 R] >>"
    objects[5] = stream(b"<xdp><script>while(true);</script></xdp>")
    objects[6] = b"<< /Type /Filespec /F (/etc/passwd) /EF << /F 5 0 R >> >>"
    objects[7] = script.encode()
    launch = "<< /S /Launch /F (/bin/sh) >>"
    objects[8] = (
        f"<< /Type /Annot /Subtype /Widget /FT /Tx /T (x) /V (y) /Rect [0 0 50 20] /A {launch} /AA "
        f"<< /F {script} /C {script} >> >>"
    ).encode()
    objects[9] = (
        b"<< /Type /Annot /Subtype /Link /Rect [0 0 9 9] /A << /S /URI /URI (http://x) >> >>"
    )
    return assembled(objects)


def deep(depth: int) -> bytes:
    nested = b"[" * depth + b"]" * depth
    return page(b"q " * depth + b"Q " * depth, "", {5: nested})


def font(program: bytes, kind: str) -> bytes:
    told = {
        5: b"<< /Type /Font /Subtype /TrueType /BaseFont /X /FontDescriptor 6 0 R "
        b"/FirstChar 32 /LastChar 126 /Widths 8 0 R >>",
        6: f"<< /Type /FontDescriptor /FontName /X /Flags 4 /{kind} 7 0 R >>".encode(),
        7: stream(program, "/Filter [/FlateDecode /FlateDecode]"),
        8: b"[" + b"600 " * 95 + b"]",
    }
    more = "/Resources << /Font << /F 5 0 R >> >>"
    return page(b"BT /F 12 Tf 9 9 Td (abc) Tj ET", more, told)


BOMBS: dict[str, Callable[[], bytes]] = {
    "a million pages": million_pages,
    "pages of 10^9 points": lambda: pdf([Sheet(["x"], size=(1e9, 1e9))]),
    "pages of no size": lambda: pdf([Sheet(["x"], size=(0.0, -5.0))]),
    "a font of a gigabyte": lambda: font(deflated(1024), "FontFile2"),
    "a font of noise": lambda: font(zlib.compress(random.Random(1).randbytes(9999)), "FontFile3"),
    "an image of 3.6 Gpx": lambda: image(f"{HUGE} {RGB}", b"x"),
    "an image of a gigabyte": lambda: image(
        f"/Width 18000 /Height 18000 {RGB} /Filter [/FlateDecode /FlateDecode]", deflated(1024)
    ),
    "JBIG2": lambda: image(
        f"{HUGE} /ColorSpace /DeviceGray /BitsPerComponent 1 /Filter /JBIG2Decode",
        bytes.fromhex("00000000300001000000130000ea600000ea6000000000000000000000000000")
        + random.Random(2).randbytes(4096),
    ),
    "JPX": lambda: image(
        f"{HUGE} /Filter /JPXDecode",
        bytes.fromhex(
            "ff4fff51002f000000003b9aca003b9aca00000000000000000000000400000004000000000000000000"
            "0003070101070101070101ff52000c00000001000504040001ff5c00134040484850484850484850484850"
        )
        + random.Random(3).randbytes(4096),
    ),
    "circles": circle,
    "a length of its own": own_length,
    "actions": actions,
    "nests": lambda: deep(200_000),
    "a million operators": lambda: page(b"0 0 99 99 re f\n" * 1_000_000),
    "cut off": lambda: GOOD[: len(GOOD) // 2],
    "nothing but a head": lambda: b"%PDF-1.7",
    "noise": lambda: b"%PDF-1.7\n" + random.Random(4).randbytes(99_999),
}
FATES = {"read", "too_many_pages", "invalid_document", "document_too_large", "too_much_text"}


@pytest.mark.more
async def test_bombs_end_in_typed_answers_and_the_reader_goes_on() -> None:
    fates = {}
    async with pool() as reader:
        for name, make in BOMBS.items():
            fates[name] = await read(reader, make())
            assert await read(reader, GOOD) == "read", f"after {name}"
    assert set(fates.values()) <= FATES, fates
    assert fates["a million pages"] in ("too_many_pages", "invalid_document")
    assert fates["pages of 10^9 points"] == "invalid_document", fates
    assert fates["actions"] == "read"


def mutated(number: int) -> bytes:
    """A good file with some bytes changed, cut out or doubled."""
    draw = random.Random(number)
    data = bytearray(GOOD)
    for _ in range(draw.randint(1, 12)):
        at, length = draw.randrange(len(data)), draw.randint(1, 40)
        how = draw.randrange(4)
        if how == 0:
            data[at : at + length] = draw.randbytes(length)
        elif how == 1:
            del data[at : at + length]
        elif how == 2:
            data[at:at] = data[at : at + length] * draw.randint(1, 9)
        else:
            data[at : at + 1] = str(draw.choice((-1, 0, 2**31, 10**20))).encode()
    return bytes(data if b"%PDF-" in data[:1024] else b"%PDF-1.7\n" + data)


def mutate(numbers: range) -> None:
    async def scenario() -> list[str]:
        async with pool(media_workers=2) as reader:
            fates = await asyncio.gather(*(read(reader, mutated(number)) for number in numbers))
            assert await read(reader, GOOD) == "read"
            return fates

    fates = asyncio.run(scenario())
    assert set(fates) <= FATES | {"encrypted_document"}
    assert "read" in fates and "invalid_document" in fates


def test_sixty_mutated_files_are_read_or_refused() -> None:
    mutate(range(60))


@pytest.mark.slow
def test_a_thousand_mutated_files_are_read_or_refused() -> None:
    mutate(range(60, 1060))


@pytest.mark.more
async def test_a_page_that_takes_too_long_ends_its_worker_and_is_refused_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pool(decode_timeout=1.0) as reader:
        slow = endless()
        file = DocumentBytes(digest(slow), slow)
        wanted = [PageWanted(0, PageDrawing((64, 64)), text=False)]
        try:
            first = await read(reader, slow)
        except EngineUnavailable:  # no CPU time on a busy machine
            return
        assert first == "document_too_large"
        with orders(monkeypatch) as sent:
            with pytest.raises(ImageError, match=r"page 1 of the PDF takes more than 0\.25 s"):
                await reader.pages(file, wanted)
            assert not sent
        assert await read(reader, GOOD) == "read"


SLOW = {
    "forms in forms": lambda: nested(150, 60),
    "luminosity masks": lambda: masked(100_000),
}


@pytest.mark.first
@pytest.mark.parametrize("name", SLOW)
async def test_a_page_ends_with_its_processor_time_and_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """However long a busy machine takes; no page is drawn after it, and none when sent again."""
    monkeypatch.setattr(document_pool, "PATIENCE", 240.0)
    slow = SLOW[name]()
    assert len(slow) < 1_300_000
    metrics = Metrics()
    async with pool(metrics, decode_timeout=0.8) as reader:
        file = DocumentBytes(digest(slow), slow)
        sizes = await reader.sizes(file)
        wanted = [
            PageWanted(index, PageDrawing((256, 256)), text=True) for index in range(len(sizes))
        ]
        told = r"page 1 of the PDF takes more than 0\.2 s of CPU time"
        with orders(monkeypatch) as sent:
            with pytest.raises(ImageError, match=told) as caught:
                await reader.pages(file, wanted)
            assert caught.value.code == "document_too_large"
            assert len(sent) <= 2
        with orders(monkeypatch) as sent:
            again = DocumentBytes(file.digest, slow, Requester())
            for count in (len(wanted), 1):
                with pytest.raises(ImageError, match=told):
                    await reader.pages(again, wanted[:count])
            assert not sent
        assert metrics.value(RENDERED) == 0
        assert await read(reader, GOOD) == "read"


@pytest.mark.first
async def test_a_page_that_takes_too_long_takes_no_other_page_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readers of a book ask for its pages one by one."""
    monkeypatch.setattr(document_pool, "PATIENCE", 240.0)
    kids = b"<< /Type /Pages /Kids [3 0 R 9 0 R] /Count 2 >>"
    simple = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] >>"
    book = nested(1, 60).replace(b"<< /Type /Pages /Kids [3 0 R ] /Count 1 >>", kids)
    head, _, _ = book.partition(b"xref\n")
    book = head + b"9 0 obj\n" + simple + b"\nendobj\ntrailer << /Root 1 0 R >>\n%%EOF"
    async with pool(decode_timeout=0.8) as reader:
        file = DocumentBytes(digest(book), book)
        assert len(await reader.sizes(file)) == 2
        slow, other = (PageWanted(index, PageDrawing((256, 256)), text=False) for index in range(2))
        with pytest.raises(ImageError, match="page 1 of the PDF takes more"):
            await reader.pages(file, [slow])
        ((_, png),) = await reader.pages(file, [other])
        assert png.startswith(b"\x89PNG")
        with orders(monkeypatch) as sent:
            for wanted in ([slow], [other, slow]):
                with pytest.raises(ImageError, match="page 1 of the PDF takes more"):
                    await reader.pages(file, wanted)
            assert not sent


async def test_a_part_that_takes_too_long_takes_no_whole_page_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part's page is drawn larger."""
    monkeypatch.setattr(document_pool, "PATIENCE", 240.0)
    lines = "\n".join(f"{k % 300} 0 m {300 - k % 300} 200 l S" for k in range(20_000))
    book = page(lines.encode())
    part = PageWanted(0, PageDrawing((5000, 7500), Box(0, 0, 9, 9)), text=False)
    async with pool(decode_timeout=0.8) as reader:
        file = DocumentBytes(digest(book), book)
        with pytest.raises(ImageError, match="use a smaller max_pixels"):
            await reader.pages(file, [part])
        with orders(monkeypatch) as sent:
            with pytest.raises(ImageError, match="use a smaller max_pixels"):
                await reader.pages(file, [part])
            assert not sent
            with suppress(ImageError):  # slow machines may take too long for this, too
                await reader.pages(file, [PageWanted(0, PageDrawing((16, 24)), text=False)])
            assert sent


async def test_a_document_ends_with_its_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_pool, "PATIENCE", 240.0)
    monkeypatch.setattr(document_pool, "PAGE_SHARE", 100.0)
    monkeypatch.setattr(document_pool, "DOCUMENT_SHARE", 1e-4)
    metrics = Metrics()
    async with pool(metrics) as reader:
        many = nested(90, 20)
        file = DocumentBytes(digest(many), many)
        wanted = [PageWanted(index, PageDrawing((64, 64)), text=True) for index in range(90)]
        with orders(monkeypatch) as sent, pytest.raises(ImageError) as caught:
            await reader.pages(file, wanted)
        assert re.match(
            r"the PDF's first \d+ of 90 pages take more than 0\.0006 s", caught.value.message
        )
        drawn = metrics.value(RENDERED)
        assert drawn < 5 and len(sent) <= drawn + 2
        with orders(monkeypatch) as sent, pytest.raises(ImageError, match="of 90 pages take"):
            await reader.pages(file, wanted)
        assert not sent


def test_a_page_of_another_is_read_after_one_of_a_long_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three requests for twenty pages each, and then one of another key: its sizes wait for nobody,
    and its page for the one that is being drawn.
    """
    events: list[tuple[str, str]] = []
    add, run = Turns.add, document_pool._Readers._run
    came = asyncio.Event()

    def added(turns: Turns[Any], work: Any) -> None:
        if work.page is not None:
            events.append(("comes", work.requester.client))
            if work.requester.client == "anna":
                came.set()
        add(turns, work)

    async def served(readers: Any, slot: Any, work: Any) -> None:
        if work.page is not None:
            events.append(("is served", work.requester.client))
            await came.wait()  # the first page is being drawn until then
        await run(readers, slot, work)

    monkeypatch.setattr(Turns, "add", added)
    monkeypatch.setattr(document_pool._Readers, "_run", served)

    async def scenario() -> None:
        metrics = Metrics()
        async with pool(metrics) as reader:
            long = pdf([Sheet([f"page {number}"]) for number in range(20)])
            hostile = [
                asyncio.create_task(all_pages(reader, long, "mallory", 20)) for _ in range(3)
            ]
            async with asyncio.timeout(60):
                while ("is served", "mallory") not in events:
                    await asyncio.sleep(0)
            await all_pages(reader, GOOD, "anna", 1)
            await asyncio.gather(*hostile)
            assert metrics.value(RENDERED) == 61

    asyncio.run(scenario())
    served_in_turn = [client for event, client in events if event == "is served"]
    assert served_in_turn[:2] == ["mallory", "anna"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("what", ["pages", "sizes"])
async def test_no_client_holds_all_workers_however_slow_its_pages_are(
    monkeypatch: pytest.MonkeyPatch, what: str, workers: int
) -> None:
    """One client's orders do not end before another has its page, and a third one's after that."""
    run, served, others_done = document_pool._Readers._run, list[str](), asyncio.Event()

    async def held(readers: Any, slot: Any, work: Any) -> None:
        served.append(work.requester.client)
        if work.requester.client == "mallory" and (work.page is None) == (what == "sizes"):
            await others_done.wait()
        await run(readers, slot, work)

    monkeypatch.setattr(document_pool._Readers, "_run", held)
    async with pool(media_workers=workers) as reader:
        long = pdf([Sheet([f"page {number}"]) for number in range(6)])
        hostile = [asyncio.create_task(all_pages(reader, long, "mallory", 6)) for _ in range(3)]
        slow = 1 if what == "sizes" else 3 + workers  # whose sizes are known by then
        async with asyncio.timeout(60):
            while served.count("mallory") < slow:
                await asyncio.sleep(0)
            for client in ("anna", "ben", "anna"):
                await all_pages(reader, GOOD, client, 2)
        assert served.count("mallory") == slow, "the worker that is left is not hers"
        others_done.set()
        await asyncio.gather(*hostile)
    assert served.count("mallory") == 3 * 7


async def all_pages(reader: DocumentPool, data: bytes, client: str, count: int) -> None:
    file = DocumentBytes(digest(data), data, Requester(client, tenant=client))
    await reader.sizes(file)
    await reader.pages(
        file, [PageWanted(index, PageDrawing((64, 64)), text=True) for index in range(count)]
    )


@pytest.mark.more
async def test_a_stopped_reader_is_replaced_and_no_page_is_to_blame() -> None:
    before, metrics = {process.pid for process in page_workers()}, Metrics()
    async with pool(metrics, decode_timeout=1.5) as reader:
        await all_pages(reader, GOOD, "", 1)
        for process in page_workers():
            if process.pid not in before:
                process.suspend()
        await all_pages(reader, pdf([Sheet(["three"])]), "", 1)
        assert metrics.value("saccade_image_worker_restarts_total") == 2, "sizes, and a page"


def page_workers() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.name() == "saccade-page"]


@pytest.mark.more
async def test_nobody_waits_for_a_document_any_more_and_the_next_is_read() -> None:
    async with pool() as reader:
        slow = page(b"0 0 99 99 re f\n" * 300_000)
        reading = asyncio.create_task(read(reader, slow))
        await asyncio.sleep(0.2)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert await read(reader, GOOD) == "read"


# ---- what is remembered of a file


class Room(Boundless):
    """A request's, of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def reserve(self, nbytes: int) -> None:
        if nbytes > self.left:
            raise Overloaded("no room")
        self.left -= nbytes


async def see(
    path: Path,
    data: bytes = GOOD,
    salt: str = "",
    room: MemoryBudget = BOUNDLESS,
    view: DocumentView = WHOLE_DOCUMENT,
) -> tuple[OpenedPage, ...]:
    source = SentFile(data, "file", Budget(max_pixels=64 * 64), view=view)
    (found,) = await SentFiles(path.media).open([source], salt, Requester(budget=room))
    assert isinstance(found, tuple)
    return found


def rendered(path: Path) -> float:
    return path.metrics.value(RENDERED)


def digests(pages: tuple[OpenedPage, ...]) -> list[bytes]:
    return [page.image.encoded.digest for page in pages if page.image is not None]


async def test_two_who_ask_at_once_have_a_page_drawn_once_and_tenants_share_nothing(
    media_path: MakePath,
) -> None:
    async with media_path() as path:
        one, two = await asyncio.gather(see(path), see(path))
        assert digests(one) == digests(two) and rendered(path) == 2
        assert [page.text for page in one] == ["the quick brown fox", "two"]
        again = await see(path)
        assert digests(again) == digests(one) and rendered(path) == 2
        assert all(page.image and not page.image.encoded.data for page in again)
        assert digests(await see(path, salt="other")) == digests(one)
        assert rendered(path) == 4


@pytest.mark.parametrize(
    ("pages", "hidden", "speculative", "read"),
    [
        (1, 1, "auto", "short"),
        (DRAFT_PAGES, 1, "auto", "short"),
        (DRAFT_PAGES + 1, 1, "auto", ""),
        (1, MAX_SHORT_TEXT + 1, "auto", "no text"),
        (1, 1, "off", ""),
    ],
)
async def test_the_text_of_a_few_pages_is_read_for_drafts(
    media_path: MakePath,
    monkeypatch: pytest.MonkeyPatch,
    pages: int,
    hidden: int,
    speculative: str,
    read: str,
) -> None:
    """Once, whoever asks; a longer text is not one for drafts, but a reader of texts has it."""
    line = "a" * hidden
    data = pdf([Sheet([], picture(40, 60, 3), hidden=[line])] * pages)
    bare = DocumentView("bare")
    async with media_path(speculative=speculative) as path:
        with orders(monkeypatch) as sent:
            for _ in range(2):
                found = await see(path, data, view=bare)
                assert {page.text for page in found} == {line if read == "short" else ""}
        asked = [page for order in sent if isinstance(order, ReadDocument) for page in order.pages]
        assert [(page.text, page.short) for page in asked] == [(bool(read), bool(read))] * pages
        assert {page.text for page in await see(path, data)} == {line}


async def test_a_request_that_gives_up_takes_nothing_from_another(media_path: MakePath) -> None:
    async with media_path() as path:
        one, two = (asyncio.create_task(see(path)) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        assert len(await two) == 2 and rendered(path) == 2


async def test_what_is_drawn_counts_in_the_requests_room(media_path: MakePath) -> None:
    async with media_path() as path:
        with pytest.raises(Overloaded):
            await see(path, room=Room(100))
        room = Room(1 << 20)
        await see(path, salt="other", room=room)
        assert 100 < (1 << 20) - room.left < 64 * 64 * 6
        assert (await see(path, salt="other", room=Room(0)))[0].text


def test_metadata_outlives_a_server_and_is_read_anew_if_damaged(
    media_path: MakePath, tmp_path: Folder
) -> None:
    longest = pdf([Sheet([f"{number} " * 40] * 30, font_size=6) for number in range(60)])

    async def scenario() -> tuple[float, tuple[OpenedPage, ...]]:
        async with media_path(metadata_folder=tmp_path / "cards") as path:
            pages = await see(path, longest)
            return rendered(path), pages

    count, first = asyncio.run(scenario())
    assert count == 60 and sum(len(page.text) for page in first) > LARGEST, "in several pieces"
    count, second = asyncio.run(scenario())
    assert count == 0
    assert [page.text for page in second] == [page.text for page in first]
    assert digests(second) == digests(first)
    with closing(sqlite3.connect(tmp_path / "cards" / "cards.db")) as database, database:
        database.execute("UPDATE cards SET card = substr(card, 1, 20)")
    count, third = asyncio.run(scenario())
    assert count == 60 and digests(third) == digests(first)
