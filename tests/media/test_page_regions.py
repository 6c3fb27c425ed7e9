"""Regions of a PDF's pages: each equals the page drawn large and cut, bit for bit. It is drawn
once, in bounded pixels, whatever a client asks for.
"""

from __future__ import annotations

import ctypes
import io
import math
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image
import pypdfium2
import pytest
from blake3 import blake3

from saccade.core.errors import ImageError, InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.plan import PixelSlot
from saccade.core.recipe import PageDrawing
from saccade.media.content import Budget
from saccade.media.sent_files import OpenedPage, SentFiles
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import (
    Address,
    Digest,
    FileId,
    ImageRegion,
    ImageSource,
    SentFile,
)
from saccade.plugins.documents.page_drawing import MAX_PIXELS, MAX_SCALE, PageSize
from saccade.plugins.files.uploads import uploads_of
from saccade_bench.fixtures.pdf import Sheet, assembled, pdf, stream
from tests.fixtures.tiny import picture
from tests.media.conftest import MakePath, Path
from tests.media.pictures import encode, photo

AT = "messages[0].content[0]"
RENDERED = "saccade_pages_rendered_total"
Corners = tuple[int, int, int, int]
BOX: Corners = (30, 40, 230, 190)
PAPER = [
    Sheet(["the quick brown fox", "two"], picture(40, 60, 3)),
    Sheet(["other"], size=(300, 200)),
]
FILE = pdf(PAPER)


def region(box: Corners) -> ImageRegion:
    return ImageRegion(*box, f"{AT}.region")


def part(url: Address, box: Corners | None = BOX, page: int | None = 1, **budget: Any) -> SentFile:
    shown = None if box is None else region(box)
    return SentFile(url, AT, Budget(**budget), page=page, region=shown)


async def see(
    path: Path, *sources: SentFile, requester: Requester | None = None
) -> list[OpenedPage]:
    found = await SentFiles(path.media).open(sources, "", requester or Requester())
    pages: list[OpenedPage] = []
    for each in found:
        assert isinstance(each, tuple)
        pages += each
    return pages


def drawing_of(page: OpenedPage) -> PageDrawing:
    assert page.image is not None and page.image.encoded.page is not None
    return page.image.encoded.page.drawing


def pixels_of(page: OpenedPage) -> Any:
    assert page.image is not None
    return np.asarray(PIL.Image.open(io.BytesIO(page.image.encoded.data)))


def rendered(path: Path) -> float:
    return path.metrics.value(RENDERED)


def drawn_large(data: bytes, index: int, size: tuple[int, int]) -> Any:
    """All of a page as PDFium draws it, by calls of our own."""
    raw: Any = pypdfium2.raw
    document = pypdfium2.PdfDocument(data)
    pixels = np.full((*size, 3), 255, np.uint8)
    pointer = pixels.ctypes.data_as(ctypes.c_void_p)
    shape = size[1], size[0], raw.FPDFBitmap_BGR, pointer, pixels.strides[0]
    bitmap = raw.FPDFBitmap_CreateEx(*shape)
    place = 0, 0, size[1], size[0], 0, raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER
    page = document[index]
    raw.FPDF_RenderPageBitmap(bitmap, page.raw, *place)
    raw.FPDFBitmap_Destroy(bitmap)
    page.close()
    document.close()
    return pixels


def page_of(contents: str, more: str = "", others: dict[int, bytes] | None = None) -> bytes:
    head = "/Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents 4 0 R"
    return assembled(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            3: f"<< {head} {more} >>".encode(),
            4: stream(contents.encode()),
            **(others or {}),
        }
    )


HATCHED = page_of(
    "/Pattern cs /P scn 10 10 280 180 re f",
    "/Resources << /Pattern << /P 5 0 R >> >>",
    {
        5: stream(
            b"1 0 0 RG 0.7 w 0 0 m 7.3 7.3 l S",
            "/Type /Pattern /PatternType 1 /PaintType 1 /TilingType 1 /BBox [0 0 7.3 7.3] "
            "/XStep 7.3 /YStep 7.3 /Resources << >>",
        )
    },
)
SHADED = page_of(
    "/S sh 0 0 1 rg /G gs 40.3 30.7 m 200 180 l 260 20 l f",
    "/Resources << /Shading << /S << /ShadingType 2 /ColorSpace /DeviceRGB /Coords [0 0 300 200] "
    "/Function << /FunctionType 2 /Domain [0 1] /C0 [1 0 0] /C1 [0 1 0] /N 1 >> >> >> "
    "/ExtGState << /G << /ca 0.4 /BM /Multiply >> >> >>",
)
TURNED = page_of("1 0 0 rg 20 20 100 40 re f 0 0.3 m 300 177.7 l S", "/Rotate 90")
MOVED = page_of("0 0 1 rg 60 60 80 40 re f 0 0 m 400 233 l S", "/MediaBox [50 50 350.4 250.6]")
KINDS = {"text": FILE, "hatched": HATCHED, "shaded": SHADED, "turned": TURNED, "moved": MOVED}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_region_equals_the_page_drawn_large_and_cut(
    media_path: MakePath, kind: str
) -> None:
    data = KINDS[kind]
    seen = 0
    async with media_path() as path:
        for box in ((30, 40, 130, 190), (0, 0, 31, 50), (101, 7, 200, 199)):
            (page,) = await see(path, part(data, box))
            drawing = drawing_of(page)
            assert drawing.box is not None
            large = drawn_large(data, 0, drawing.size)
            cut = large[drawing.box.slices]
            seen += int((cut != 255).any())
            assert np.array_equal(pixels_of(page), cut)
    assert seen >= 2, "something is drawn there"


async def test_a_region_is_where_its_points_say(media_path: MakePath) -> None:
    """From the left and the top of the page as people see it."""
    data = page_of("1 0 0 rg 100 150 50 20 re f")  # 30 to 50 points below the top
    async with media_path() as path:
        (page,) = await see(path, part(data, (100, 30, 150, 50)))
        assert (pixels_of(page) == (255, 0, 0)).mean() > 0.95
        (page,) = await see(path, part(data, (90, 20, 160, 60)))
        red = pixels_of(page)[..., 1] == 0
        assert red.mean() == pytest.approx(50 * 20 / (70 * 40), abs=0.02)


async def test_a_region_has_the_detail_that_its_page_lacks(media_path: MakePath) -> None:
    """A part has as many pixels as its page, or as `max_pixels` says."""
    async with media_path() as path:
        (whole,) = await see(path, part(FILE, None))
        (near,) = await see(path, part(FILE))
        (nearer,) = await see(path, part(FILE, max_pixels=256 * 256))
        sizes = [drawing_of(each) for each in (whole, near, nearer)]
        pixels = [math.prod(each.kept) for each in sizes]
        assert pixels[1] == pytest.approx(pixels[0], rel=0.1)
        assert pixels[2] == pytest.approx(256 * 256, rel=0.1)
        assert sizes[1].size[0] > 2.5 * sizes[0].size[0]
        (small,) = await see(path, part(FILE, detail="low"))
        assert math.prod(drawing_of(small).kept) == pytest.approx(512 * 512, rel=0.1)


async def test_a_region_is_shown_alone(media_path: MakePath) -> None:
    """Without the page's text and number, as a crop of the client's own."""
    async with media_path() as path:
        source = part(FILE)
        (page,) = await see(path, source)
        assert (page.text, source.view.shown, page.number) == ("", "bare", 1)


async def test_a_region_is_drawn_once(media_path: MakePath, tmp_path: pathlib.Path) -> None:
    """Nothing is drawn for the same again, also by another server with the folder."""
    names = []
    for wanted in ((1, 1, 2), (0, 0, 0)):
        async with media_path(metadata_folder=tmp_path / "cards") as path:
            for box, count in zip((BOX, BOX, (0, 0, 99, 99)), wanted, strict=True):
                (page,) = await see(path, part(FILE, box))
                assert page.image is not None
                names.append(page.image.encoded.digest)
                assert rendered(path) == count
    assert names[:3] == names[3:] and names[0] == names[1] != names[2]


async def test_regions_have_names_by_page_corners_and_bounds(media_path: MakePath) -> None:
    async with media_path() as path:
        others = [
            part(FILE),
            part(FILE, None),
            part(FILE, (30, 40, 230, 189)),
            part(FILE, (0, 0, 200, 300), 2),
            part(FILE, max_pixels=128 * 128),
        ]
        pages = [(await see(path, each))[0] for each in others]
        assert len({each.image.encoded.digest for each in pages if each.image}) == len(others)


async def test_all_of_a_page_is_the_page(media_path: MakePath) -> None:
    """A side that ends within a point is named by its next whole number."""
    data = pdf([Sheet(["one"], size=(299.6, 200.2))])
    async with media_path() as path:
        (whole,) = await see(path, part(data, None))
        (same,) = await see(path, part(data, (0, 0, 201, 300)))
        assert whole.image and same.image
        assert whole.image.encoded.digest == same.image.encoded.digest
        assert rendered(path) == 1


async def test_regions_of_one_file_read_it_once(
    media_path: MakePath, tmp_path: pathlib.Path
) -> None:
    async with media_path(files_dir=str(tmp_path / "files")) as path:
        stored = await uploads_of(path.media).save(FILE, "a.pdf", "user_data", None, "ann")
        requester, reads, read = (
            Requester(owner="ann", tenant="ann"),
            [],
            uploads_of(path.media).read,
        )

        async def counted(*asked: Any) -> bytes:
            reads.append(asked)
            return await read(*asked)

        uploads_of(path.media).read = counted  # type: ignore[method-assign, assignment]
        boxes = [(0, 0, 90, 90), (90, 0, 180, 90), (0, 90, 90, 180)]
        pages = await see(
            path, *(part(FileId(stored.id), box) for box in boxes), requester=requester
        )
        assert len(pages) == 3 and len(reads) == 1
        name = Digest(f"blake3-{blake3(FILE).hexdigest()}")
        (same,) = await see(path, part(name, boxes[0]), requester=requester)
        assert same.image and pages[0].image
        assert same.image.encoded.digest == pages[0].image.encoded.digest
        with pytest.raises(ImageError) as refused:
            await see(path, part(name), requester=Requester(owner="bob", tenant="bob"))
        assert refused.value.code == "unknown_digest"


async def test_a_digest_names_a_pdf_of_the_same_request(media_path: MakePath) -> None:
    async with media_path() as path:
        name = Digest(f"blake3-{blake3(FILE).hexdigest()}")
        shown = await see(path, part(name), part(FILE, None, 2))
        (alone,) = await see(path, part(FILE))
        assert shown[0].image and alone.image
        assert shown[0].image.encoded.digest == alone.image.encoded.digest


async def test_a_region_whose_pixels_have_gone_is_drawn_again(media_path: MakePath) -> None:
    async with media_path() as path:

        async def decoded() -> bytes:
            (page,) = await see(path, part(FILE))
            assert page.image is not None
            opened = await path.media.open(ImageSource(page.image, AT), "")
            path.media.hold_image(opened)
            slot = PixelSlot(0, *opened.image.canvas)
            await path.media.decode(opened.image.key, slot)
            path.media.release_image(opened)
            assert opened.image.canvas == drawing_of(page).kept, "drawn as the tower sees it"
            return path.arena.view(slot).tobytes()

        first = await decoded()
        assert await decoded() == first and rendered(path) == 2


# ---- what is refused


@pytest.mark.parametrize(
    "box",
    [
        (0, 0, 596, 842),
        (0, 0, 595, 843),
        (-1, 0, 4, 4),
        (0, -1, 4, 4),
        (5, 5, 5, 9),
        (9, 9, 5, 5),
        (595, 842, 595, 842),
        (0, 0, 2**63 - 1, 2**63 - 1),
        (-(2**63), 0, 1, 1),
    ],
)
async def test_a_region_beside_the_page_is_refused_with_its_size(
    media_path: MakePath, box: Corners
) -> None:
    async with media_path() as path:
        with pytest.raises(ImageError) as refused:
            await see(path, part(FILE, box))
        assert (refused.value.param, refused.value.code) == (f"{AT}.region", "invalid_region")
        assert "page 1 of the PDF is 595 x 842 points" in refused.value.message
        assert rendered(path) == 0


async def test_what_has_no_such_page_is_refused(media_path: MakePath) -> None:
    async with media_path() as path:
        for source, said in (
            (part(FILE, page=None), "the PDF has 2 pages: set page to the region's page"),
            (part(FILE, page=3), "page 3 was requested, but the PDF has 2 pages"),
            (part(encode(photo(30, 40)), page=1), "the file is an image: omit page"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                await see(path, source)
        (only,) = await see(path, part(pdf([PAPER[0]]), page=None))
        assert only.image is not None and rendered(path) == 1


# ---- bounds


def shapes() -> Iterator[tuple[PageSize, Corners, Budget]]:
    """Pages and regions as a client that means harm would choose them."""
    choose = random.Random(7)
    sides = (0.01, 0.5, 1, 3.7, 72, 595.28, 842, 3370.4, 14400, 99_999.9, 1e6)
    for height in sides:
        for width in sides:
            most = math.ceil(width), math.ceil(height)
            for _ in range(6):
                x, y = (choose.randrange(side) for side in most)
                right = min(most[0], x + choose.choice((1, 2, 50, most[0])))
                bottom = min(most[1], y + choose.choice((1, 2, 50, most[1])))
                least, most_pixels = choose.choice(((None, None), (None, 1024**2), (1024**2, None)))
                yield (
                    PageSize(1, height, width),
                    (x, y, right, bottom),
                    Budget(min_pixels=least, max_pixels=most_pixels),
                )


def test_no_region_has_a_page_drawn_larger_than_the_bound(spec: FamilySpec) -> None:
    drawn = 0
    for page, box, budget in shapes():
        try:
            drawing = page.draw(spec, budget, region(box))
        except ImageError:  # a shape that no model takes
            continue
        drawn += 1
        (rows, columns), (height, width) = drawing.size, drawing.kept
        assert 1 <= height <= rows and 1 <= width <= columns
        assert rows <= max(1, math.ceil(page.height * MAX_SCALE))
        assert columns <= max(1, math.ceil(page.width * MAX_SCALE))
        assert rows * columns <= MAX_PIXELS * 1.01 + rows + columns
        if drawing.box is not None:
            assert 0 <= drawing.box.top <= drawing.box.bottom <= rows
            assert 0 <= drawing.box.left <= drawing.box.right <= columns
    assert drawn > 200


@pytest.mark.more
async def test_the_largest_page_is_drawn_within_a_reader_s_memory(media_path: MakePath) -> None:
    """A point of A4 at the largest scale, through a transparent page."""
    data = page_of(
        "/G gs 0 0 1 rg 0 0 600 850 re f",
        "/MediaBox [0 0 595 842] /Group << /S /Transparency /CS /DeviceRGB >> "
        "/Resources << /ExtGState << /G << /ca 0.5 /BM /Multiply >> >> >>",
    )
    async with media_path() as path:
        (page,) = await see(path, part(data, (300, 400, 302, 402), max_pixels=1024**2))
        drawing = drawing_of(page)
        assert math.prod(drawing.size) > 0.8 * MAX_PIXELS
        assert drawing.kept == (17, 17), "no more than the page's scale has"
        assert (pixels_of(page) != 255).any()
