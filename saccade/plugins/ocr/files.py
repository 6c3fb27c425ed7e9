"""Reads the input files: their type, their pages, and pages as message parts.

This module also parses page ranges. The server draws the pages of a PDF. An image is sent
unchanged, and each frame of a TIFF as a separate TIFF.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from PIL import Image, ImageSequence, UnidentifiedImageError

from saccade.core.errors import ConfigError, SaccadeError
from saccade.core.given_paths import read_bytes, reason, shown

MAX_BYTES = 2 << 30
BEGIN = 1024
"""Number of leading bytes that must contain a PDF's signature."""
MAX_RANGES = 1000
_RANGE = re.compile(r"([0-9]{1,9})(?:(-)([0-9]{1,9})?)?")
_BROKEN = (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError)


@dataclass(frozen=True, slots=True)
class PageRange:
    """The pages from `first` to `last`, counted from 1. If `last` is `None`, the range ends with
    the file's last page.
    """

    first: int
    last: int | None


def page_ranges(text: str | None) -> tuple[PageRange, ...]:
    """Parse page ranges, such as 1-5,8,12-. Raises ConfigError."""
    if text is None:
        return ()
    ranges = []
    words = text.split(",")
    for word in words:
        found = _RANGE.fullmatch(word.strip())
        if found is None or len(words) > MAX_RANGES:
            raise ConfigError(f"--pages {shown(text)}: expected page numbers, such as 1-5,8,12-")
        first, to, last = int(found[1]), found[2], found[3]
        end = int(last) if last else None if to else first
        if first < 1 or (end is not None and end < first):
            raise ConfigError(
                f"--pages {shown(word)}: expected page numbers from 1, in ascending order"
            )
        ranges.append(PageRange(first, end))
    return tuple(ranges)


def chosen(ranges: Sequence[PageRange], count: int) -> list[int]:
    """Return the numbers of the pages in these ranges, ascending. Raises SaccadeError if one
    exceeds `count`.
    """
    if not ranges:
        return [*range(1, count + 1)]
    wanted: set[int] = set()
    for each in ranges:
        if each.first > count:
            pages = f"{count} page{'s' * (count != 1)}"
            raise SaccadeError(f"--pages requests page {each.first}, but the file has {pages}")
        wanted.update(range(each.first, min(each.last or count, count) + 1))
    return sorted(wanted)


@dataclass(frozen=True, slots=True)
class GivenFile:
    """An input file.

    pictures: the number of frames of an image, or 0 for a PDF.
    """

    path: Path
    digest: str
    pictures: int

    @property
    def is_pdf(self) -> bool:
        return self.pictures == 0

    def picture(self, number: int) -> Mapping[str, Any]:
        """Return frame `number` of an image as a message part. Raises SaccadeError."""
        data = _read(self.path)
        if self.pictures != 1:
            data = _frame(data, number, self.path)
        encoded = base64.b64encode(data).decode()
        url = f"data:application/octet-stream;base64,{encoded}"
        return {"type": "image_url", "image_url": {"url": url}}


def look(path: Path) -> tuple[GivenFile, bytes]:
    """Read a file and detect its type. Returns its description and its bytes.

    Raises SaccadeError if it is neither a PDF nor an image.
    """
    data = _read(path)
    name = blake3(data).hexdigest()
    if b"%PDF-" in data[:BEGIN]:
        return GivenFile(path, name, 0), data
    if data[4:8] == b"ftyp":  # HEIC and similar formats, which the server may support
        return GivenFile(path, name, 1), data
    try:
        with Image.open(io.BytesIO(data)) as image:
            several = image.format == "TIFF"
            count = sum(1 for _ in ImageSequence.Iterator(image)) if several else 1
    except _BROKEN:
        why = "it is empty" if not data else "it is not a PDF or an image, or it is damaged"
        raise SaccadeError(f"{why}: use PDF, PNG, JPEG, WebP or TIFF files") from None
    return GivenFile(path, name, count), data


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise SaccadeError(f"cannot be read: {reason(error)}") from None


def _frame(data: bytes, number: int, path: Path) -> bytes:
    out = io.BytesIO()
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.seek(number - 1)
            image.save(out, "TIFF", compression="tiff_adobe_deflate")
    except (*_BROKEN, EOFError) as error:
        raise SaccadeError(f"{shown(path)} cannot be read: {reason(error)}") from None
    return out.getvalue()
