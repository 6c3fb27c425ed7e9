"""Reads PDF files: `read_sizes` returns the sizes of pages, and `read_page` the text and pixels of
a page. Runs in image workers only. PDFium is in the extra `documents`.

PDFium is called through its C interface with the file in memory. The build has no JavaScript and no
XFA. It uses only its built-in fonts and those in the file, gets no password, and does not run the
actions of forms. A page is rendered as on a screen, with annotations and the values of form fields.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import PIL.Image
import pypdfium2_raw as pdfium

from saccade.core.recipe import PageDrawing
from saccade.media.reasons import Unreadable
from saccade.media.workers.orders import PageWanted

MAX_TEXT = 1 << 18
"""Maximum characters of a page's text: a hundred times a full page."""
MAX_SHORT_TEXT = 16_384
"""Maximum characters of a text that is used for draft tokens."""
MAX_SIDE = 1e6
"""Maximum height and width of a page in points: 350 meters."""
PNG_LEVEL = 1
NO_PASSWORD, NO_SCHEME = 4, 5
"""PDFium's errors for encrypted files: a password is required, or the encryption is unsupported."""
WHITE = 0xFFFF_FFFF

Sizes = list[tuple[float, float]]
"""(height, width) of each page in points, upright."""


@cache
def library() -> Any:
    """Initialize PDFium once, without any font directories, and return the module."""
    config = pdfium.FPDF_LIBRARY_CONFIG(version=2)
    nowhere = (ctypes.POINTER(ctypes.c_char) * 1)()
    config.m_pUserFontPaths = ctypes.cast(nowhere, type(config.m_pUserFontPaths))
    pdfium.FPDF_InitLibraryWithConfig(config)
    return pdfium


@contextmanager
def opened(data: mmap.mmap) -> Iterator[Any]:
    """Open a document, and close it on exit. Raises Unreadable if PDFium cannot open it."""
    pdf = library()
    # ctypes cannot take the address of a read-only mapping, but NumPy can.
    view = np.frombuffer(data, np.uint8)
    document = None
    try:
        document = pdf.FPDF_LoadMemDocument64(view.ctypes.data_as(ctypes.c_void_p), len(view), None)
        if not document:
            raise _unreadable(pdf.FPDF_GetLastError())
        yield document
    finally:
        if document:
            pdf.FPDF_CloseDocument(document)
        del view


def _unreadable(why: int) -> Unreadable:
    return Unreadable("encrypted" if why in (NO_PASSWORD, NO_SCHEME) else "damaged document")


def read_sizes(data: mmap.mmap, most_pages: int) -> Sizes:
    """Return the sizes of all pages.

    Raises Unreadable for a file without pages, or with more than `most_pages`.
    """
    pdf = library()
    with opened(data) as document:
        count = pdf.FPDF_GetPageCount(document)
        if count < 1:
            raise Unreadable("no pages")
        if count > most_pages:
            raise Unreadable("pages", count, most_pages)
        sizes, size = [], pdf.FS_SIZEF()
        for index in range(count):
            found = pdf.FPDF_GetPageSizeByIndexF(document, index, size)
            height, width = float(size.height), float(size.width)
            if not found or not all(
                math.isfinite(side) and 0 < side <= MAX_SIDE for side in (height, width)
            ):
                raise Unreadable("page size", index + 1, width, height)
            sizes.append((height, width))
        return sizes


def read_page(data: mmap.mmap, wanted: PageWanted) -> tuple[str, bytes]:
    """Return the text of a page, and its image as a PNG. Raises Unreadable.

    The text or the image is empty if it is not wanted.
    """
    pdf, drawing = library(), wanted.drawing
    with opened(data) as document, _form(document) as form:
        page = pdf.FPDF_LoadPage(document, wanted.index)
        if not page:
            raise Unreadable("page", wanted.index + 1)
        try:
            return (
                _text(page, wanted) if wanted.text else "",
                b"" if drawing is None else _draw(page, form, drawing),
            )
        finally:
            pdf.FPDF_ClosePage(page)


@contextmanager
def _form(document: Any) -> Iterator[Any]:
    """Yield PDFium's form handle, with which field values are rendered, or None without a form."""
    pdf = library()
    if pdf.FPDF_GetFormType(document) == pdf.FORMTYPE_NONE:
        yield None
        return
    # No callbacks are set, so forms cannot run actions.
    info = pdf.FPDF_FORMFILLINFO(version=2)
    form = pdf.FPDFDOC_InitFormFillEnvironment(document, info)
    try:
        yield form
    finally:
        if form:
            pdf.FPDFDOC_ExitFormFillEnvironment(form)


def _text(page: Any, wanted: PageWanted) -> str:
    pdf = library()
    found = pdf.FPDFText_LoadPage(page)
    if not found:
        return ""
    try:
        count = pdf.FPDFText_CountChars(found)
        if count > MAX_TEXT and not wanted.short:
            raise Unreadable("characters", wanted.index + 1, count, MAX_TEXT)
        if count < 1 or (wanted.short and count > MAX_SHORT_TEXT):
            return ""
        held = (ctypes.c_ushort * (count + 1))()
        written = pdf.FPDFText_GetText(found, 0, count, held)
        text = bytes(held)[: 2 * max(0, written - 1)].decode("utf-16-le", "replace")
        lines = (line.rstrip() for line in text.replace("\0", "").splitlines())
        return "\n".join(lines).strip()
    finally:
        pdf.FPDFText_ClosePage(found)


def _draw(page: Any, form: Any, drawing: PageDrawing) -> bytes:
    """Return a page, rendered as a PNG.

    A region is cropped from the full page, because PDFium's pixels differ if only the region is
    rendered.
    """
    pdf = library()
    height, width = drawing.size
    pixels = np.empty((height, width, 3), np.uint8)
    bitmap = pdf.FPDFBitmap_CreateEx(
        width,
        height,
        pdf.FPDFBitmap_BGR,
        pixels.ctypes.data_as(ctypes.c_void_p),
        pixels.strides[0],
    )
    if not bitmap:
        raise MemoryError
    try:
        pdf.FPDFBitmap_FillRect(bitmap, 0, 0, width, height, WHITE)
        place = (0, 0, width, height, 0, pdf.FPDF_ANNOT | pdf.FPDF_REVERSE_BYTE_ORDER)
        pdf.FPDF_RenderPageBitmap(bitmap, page, *place)
        if form:
            pdf.FPDF_FFLDraw(form, bitmap, page, *place)
    finally:
        pdf.FPDFBitmap_Destroy(bitmap)
    kept = pixels if drawing.box is None else pixels[drawing.box.slices]
    file = io.BytesIO()
    PIL.Image.fromarray(kept).save(file, "PNG", compress_level=PNG_LEVEL)
    return file.getvalue()


TINY = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj "
    b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj 3 0 obj<</Type/Page/Parent 2 0 R"
    b"/MediaBox[0 0 64 64]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>endobj "
    b"4 0 obj<</Length 31>>stream\nBT /F 12 Tf 4 24 Td (word) Tj ET\nendstream endobj "
    b"5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj "
    b"trailer<</Root 1 0 R/Size 6>>\n%%EOF"
)


def warm_up() -> None:
    """Read a tiny document, so that PDFium loads everything that it needs."""
    with mmap.mmap(-1, len(TINY)) as data:
        data.write(TINY)
        assert read_sizes(data, 1) == [(64.0, 64.0)]
        text, png = read_page(data, PageWanted(0, PageDrawing((64, 64)), text=True))
        assert text == "word" and png
