"""Parses headers of TIFF, WebP, JPEG 2000 and ICO files. Runs in image workers only.

These parsers replace Pillow, which does more work to open such files: it lists every TIFF strip,
allocates the WebP canvas, and decodes the icon. Malformed bytes can make a parser raise any
exception.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from math import ceil, log2

import PIL.Image
from PIL import ExifTags

from saccade.media.content import Probe

Encoded = bytes | mmap.mmap
"""Encoded bytes. Both types return `bytes` for a slice."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JP2_SIGNATURE = b"\0\0\0\x0cjP  \r\n\x87\n"
JPEG_2000_CODESTREAM = b"\xff\x4f\xff\x51"
"""The markers SOC (start of codestream) and SIZ (image size)."""
TIFF_WIDTH, TIFF_HEIGHT, TIFF_ORIENTATION = 256, 257, 274
TIFF_FORMS = {1: "B", 3: "H", 4: "I", 16: "Q"}
"""The `struct` formats of TIFF's integer types."""

MAX_PARTS = 1 << 15
"""Maximum segments or chunks to read. It is more than any camera writes, and takes milliseconds."""
MAX_TAGS = 1 << 12
"""Maximum entries of a TIFF directory to read."""
WEBP_NOTE = 1 << 16
"""Maximum bytes of EXIF or XMP to read, since the orientation is near their start."""


def exif_orientation(image: PIL.Image.Image) -> int:
    """Return the orientation in an image's EXIF or XMP metadata, or 1 if there is none.

    This calls the method of the base class. The method of Pillow's PNG class would decode the image
    to find metadata after the pixels. `header.py` has already moved these chunks to the front.
    """
    found = PIL.Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _read_tiff(data: Encoded) -> Probe:
    order = "<" if data[:2] == b"II" else ">"
    is_big = data[2:4] in (b"+\0", b"\0+")  # BigTIFF has 64-bit offsets
    (directory,) = struct.unpack_from(order + ("Q" if is_big else "I"), data, 8 if is_big else 4)
    (count,) = struct.unpack_from(order + ("Q" if is_big else "H"), data, directory)
    first, step = (directory + 8, 20) if is_big else (directory + 2, 12)
    tags = {}
    for at in range(first, first + step * min(count, MAX_TAGS), step):
        tag, kind = struct.unpack_from(order + "HH", data, at)
        if tag in (TIFF_WIDTH, TIFF_HEIGHT, TIFF_ORIENTATION):
            form = TIFF_FORMS.get(kind, "I")
            (tags[tag],) = struct.unpack_from(order + form, data, at + (12 if is_big else 8))
    orientation = tags.get(TIFF_ORIENTATION, 1)
    orientation = orientation if 1 <= orientation <= 8 else 1
    return Probe("TIFF", tags[TIFF_HEIGHT], tags[TIFF_WIDTH], "", orientation, None)


def _read_webp(data: Encoded) -> Probe:
    size: tuple[int, int] | None = None  # (width, height)
    alpha, frames = False, 0
    notes = PIL.Image.Image()
    at = 12
    for _ in range(MAX_PARTS):
        kind, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        part = data[at + 8 : at + 8 + min(length, WEBP_NOTE if kind in (b"EXIF", b"XMP ") else 10)]
        if kind == b"VP8X":
            size = int.from_bytes(part[4:7], "little") + 1, int.from_bytes(part[7:10], "little") + 1
            alpha = bool(part[0] & 0x10)
        elif kind == b"VP8 " and size is None:
            size = (
                int.from_bytes(part[6:8], "little") & 0x3FFF,
                int.from_bytes(part[8:10], "little") & 0x3FFF,
            )
        elif kind == b"VP8L" and size is None:
            bits = int.from_bytes(part[1:5], "little")
            size, alpha = ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1), bool(bits >> 28 & 1)
        elif kind == b"EXIF":
            notes.info["exif"] = part
        elif kind == b"XMP ":
            notes.info["xmp"] = part
        frames += kind == b"ANMF"
        at += 8 + length + length % 2
        if at >= len(data):
            break
    if size is None or 0 in size:
        raise ValueError("no size")
    return Probe(
        "WEBP",
        size[1],
        size[0],
        "RGBA" if alpha else "RGB",
        exif_orientation(notes),
        max(1, frames),
    )


def _read_jpeg_2000(data: Encoded) -> Probe:
    """Return the size in the codestream. In a JP2 file, the file header must have the same size."""
    if data[:4] == JPEG_2000_CODESTREAM:
        return _read_codestream(data, 0)
    size = None
    for kind, start, end in _boxes(data, 0, len(data)):
        if kind == b"jp2h":
            inner = (at for name, at, _ in _boxes(data, start, end) if name == b"ihdr")
            size = struct.unpack_from(">II", data, next(inner))
        elif kind == b"jp2c":
            found = _read_codestream(data, start)
            if size != (found.height, found.width):
                raise ValueError("two sizes")
            return found
    raise ValueError("no codestream")


def _read_codestream(data: Encoded, at: int) -> Probe:
    if data[at : at + 4] != JPEG_2000_CODESTREAM:
        raise ValueError("no sizes")
    right, bottom, left, top = struct.unpack_from(">IIII", data, at + 8)
    (components,) = struct.unpack_from(">H", data, at + 40)
    return Probe("JPEG2000", bottom - top, right - left, f"{components} components", 1, 1)


def _boxes(data: Encoded, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    for _ in range(MAX_PARTS):
        if at + 8 > end:
            return
        length, kind = struct.unpack_from(">I4s", data, at)
        start = at + 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", data, start)
            start += 8
        at = end if length == 0 else at + length
        if not start <= at <= end:
            raise ValueError("a box that ends elsewhere")
        yield kind, start, at


def _read_icon(data: Encoded) -> Probe:
    """Return the size of the icon that Pillow decodes.

    This is the largest one, and among icons of equal size the one with the lowest color depth. The
    sizes in the directory are at most 256, so the size is read from the icon itself.
    """
    (count,) = struct.unpack_from("<H", data, 4)
    best: tuple[int, int] | None = None
    where = 0
    for at in range(6, 6 + 16 * count, 16):
        width, height, colours, _, _, bits, _, place = struct.unpack_from("<BBBBHHII", data, at)
        depth = bits or (ceil(log2(colours)) if colours else 0) or 256
        rank = -(width or 256) * (height or 256), depth
        if best is None or rank < best:
            best, where = rank, place
    if data[where : where + 8] == PNG_SIGNATURE:
        width, height = struct.unpack_from(">II", data, where + 16)
    else:
        (header,) = struct.unpack_from("<I", data, where)
        width, height = struct.unpack_from("<HH" if header == 12 else "<Ii", data, where + 4)
        height = abs(height) // 2  # the mask is stored below the colors
    return Probe("ICO", height, width, "RGBA", 1, 1)


PARSERS: dict[str, Callable[[Encoded], Probe]] = {
    "TIFF": _read_tiff,
    "WEBP": _read_webp,
    "JPEG2000": _read_jpeg_2000,
    "ICO": _read_icon,
}
