"""An image's header: format, size, orientation, frames. Runs in image workers only.

Bytes may be hostile, and some parsers are native code or quadratic. So the header is read in a
process that may die, and only parts about size, mode and orientation reach Pillow: no compressed
text, no repeated notes, no more segments than images have. The worker's clock ends anything that
still takes long. Knows nothing of processes.
"""

from __future__ import annotations

import io
import mmap
import struct
import warnings
from collections.abc import Callable, Iterator

import PIL.Image
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
)

from saccade.media import heif
from saccade.media.content import RAW_MAGIC, Probe, check_pixels, read_raw
from saccade.media.reasons import Unreadable

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_TEXTS = {b"tEXt", b"zTXt", b"iTXt"}
PNG_ORIENTED = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
"""Keywords of the texts that may hold an orientation; all others are left unread."""
PNG_NOTES = PNG_TEXTS | {b"eXIf"}  # may also follow the pixels
PNG_CHUNKS = PNG_NOTES | {b"IHDR", b"PLTE", b"tRNS", b"acTL"}
PNG_EMPTY = bytes.fromhex(
    "0000000049444154 35af061e 0000000049454e44 ae426082"
)  # an IDAT and an IEND chunk with nothing in them

JPEG_SCAN = 0xDA
JPEG_SEGMENTS = {0xE0, 0xE1, 0xEE, JPEG_SCAN} | set(range(0xC0, 0xD0)) - {
    0xC4,
    0xC8,
    0xCC,
}  # JFIF, EXIF and XMP, Adobe, scan, frame

TIFF_WIDTH, TIFF_HEIGHT, TIFF_ORIENTATION = 256, 257, 274

PREFIX_BYTES = 1 << 16
"""Bytes of a GIF or a BMP that are looked at."""
MAX_PARTS = 1 << 15
"""Most segments or chunks looked at: more than any camera writes, few enough to pass in
milliseconds.
"""
MAX_KEPT = 1 << 10
"""Most chunks handed to Pillow."""
MAX_NOTES = 1 << 18
"""Most bytes of notes handed to Pillow; it takes time that grows with their square."""
MAX_TAGS = 1 << 12
"""Most entries of a TIFF's directory looked at."""

Encoded = bytes | mmap.mmap
"""A slice of it is bytes."""
Opener = Callable[[io.BytesIO], ImageFile.ImageFile]

WEBP_NOTE = 1 << 16
"""Bytes of EXIF or XMP looked at: the orientation stands at their start."""

# Opened by class, not by `PIL.Image.open`: no guessing among forty formats, and the pixel limit is
# ours to word.
OPENERS: dict[str, Opener] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}
if heif.INSTALLED:
    import pillow_heif

    OPENERS["HEIF"] = pillow_heif.HeifImageFile
VIDEO_STARTS = {
    b"\x1a\x45\xdf\xa3": "WebM or Matroska",
    b"FLV\x01": "Flash",
    b"OggS": "Ogg",
    b"\0\0\x01\xba": "MPEG",
    b"\0\0\x01\xb3": "MPEG",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "Windows Media",
}


def probe(data: Encoded, max_pixels: int) -> Probe:
    """Read a header.

    Raises Unreadable when the bytes are no image we read, are cut short, or claim more than
    `max_pixels`.
    """
    if not data:
        raise Unreadable("empty")
    found = read_raw(data) if data[: len(RAW_MAGIC)] == RAW_MAGIC else _read(data)
    check_pixels(found, max_pixels)
    return found


def _read(data: Encoded) -> Probe:
    kind = sniff(data)
    if kind is None:
        raise Unreadable(f"no image: {_what_else(data)}")
    if kind == "HEIF" and not heif.INSTALLED:
        raise Unreadable("no heic")
    try:
        return _read_header(kind, data)
    except Exception as error:  # a parser's way to say "malformed" is any exception at all
        raise Unreadable(f"bad header: {kind}") from error


def sniff(data: Encoded) -> str | None:
    """The format by its first bytes; None for an unknown format."""
    head = data[:16]
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(PNG_SIGNATURE):
        return "PNG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:4] in (b"II*\x00", b"MM\x00*"):
        return "TIFF"
    if head[4:12] in (b"ftypavif", b"ftypavis"):
        return "AVIF"
    if heif.is_heic(data[:64]):
        return "HEIF"
    if head[:2] == b"BM":
        return "BMP"
    return None


def _what_else(data: Encoded) -> str:
    """The kind of bytes that are no image, for an error message."""
    head = data[:512]
    if video := _video(head):
        return f"{video} video bytes"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in start:
        return "an SVG drawing"
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if start.startswith(b"%pdf"):
        return "a PDF document"
    if head[4:8] == b"ftyp":
        return "a HEIF image of another codec than HEVC"
    is_text = all(byte >= 32 or byte in b"\t\r\n" for byte in start) and "\ufffd" not in start[
        :-3
    ].decode(errors="replace")
    return "text" if is_text else "in no format we know"


def _video(head: bytes) -> str | None:
    """The name of a video format, by a file's first bytes."""
    if head[4:8] == b"ftyp":
        brands = {head[8:12], *(head[at : at + 4] for at in range(16, min(head[3], 64), 4))}
        return None if brands & (heif.BRANDS | heif.CONTAINERS) else "MP4 or QuickTime"
    if head[4:8] in (b"moov", b"mdat", b"wide") and head[:2] == b"\0\0":
        return "QuickTime"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "AVI"
    if len(head) > 188 and head[0] == head[188] == 0x47:
        return "MPEG transport stream"
    starts = (name for start, name in VIDEO_STARTS.items() if head.startswith(start))
    return next(starts, None)


def _read_header(kind: str, data: Encoded) -> Probe:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd EXIF data
        if kind in READERS:
            return READERS[kind](data)
        with OPENERS[kind](io.BytesIO(REDUCERS[kind](data))) as image:
            width, height = image.size
            return Probe(kind, height, width, image.mode, _orientation(image), _frames(image))


def _orientation(image: PIL.Image.Image) -> int:
    """EXIF's, or XMP's.

    Pillow's own PNG method would decode the image to look for more: the header made here is
    complete.
    """
    found = PIL.Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _frames(image: ImageFile.ImageFile) -> int | None:
    if isinstance(image, (PngImagePlugin.PngImageFile, AvifImagePlugin.AvifImageFile)):
        return int(image.n_frames)
    return None if isinstance(image, GifImagePlugin.GifImageFile) else 1


def jpeg_segments(data: Encoded | memoryview) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of a JPEG's segments, up to its first scan.

    Raises ValueError without a scan, or IndexError.
    """
    at = 2
    for _ in range(MAX_PARTS):
        if data[at] != 0xFF or data[at + 1] in (
            0x00,
            0xFF,
        ):  # padding and stray bytes between segments are allowed
            at += 1
            continue
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield marker, at, end
        if marker == JPEG_SCAN:
            return
        at = end
    raise ValueError("too many segments before the first scan")


def _jpeg_header(data: Encoded) -> bytes:
    """The segments up to the first scan about size, mode and orientation."""
    kept = [data[:2]]
    room = MAX_NOTES
    for marker, at, end in jpeg_segments(data):
        if marker == JPEG_SCAN or (
            marker in JPEG_SEGMENTS and len(kept) < MAX_KEPT and end - at <= room
        ):
            kept.append(data[at:end])
            room -= end - at
    return b"".join(kept)


def _png_header(data: Encoded) -> bytes:
    """The chunks about size, mode, orientation and frames, at any place, around an empty image."""
    kept = [PNG_SIGNATURE]
    wanted = PNG_CHUNKS
    texts: set[bytes] = set()
    at, room = len(PNG_SIGNATURE), MAX_NOTES
    for _ in range(MAX_PARTS):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 12 + length
        if kind in wanted and len(kept) < MAX_KEPT and end - at <= room:
            part = data[at:end]
            keyword = part[8 : part.find(b"\0", 8) + 1]
            if kind not in PNG_TEXTS or (keyword in PNG_ORIENTED and keyword not in texts):
                kept.append(part)
                room -= end - at
                texts.add(keyword)
        if kind == b"IDAT":
            wanted = PNG_NOTES
        if kind in (b"IEND", b""):
            break
        at = end
    return b"".join(kept) + PNG_EMPTY


def _first_bytes(data: Encoded) -> bytes:
    return data[:PREFIX_BYTES]


def _all_bytes(data: Encoded) -> bytes:
    return data[:]


def _read_tiff_header(data: Encoded) -> Probe:
    """Width, height and orientation from the first directory.

    Pillow would build a list of every strip to open the file.
    """
    order = "<" if data[:2] == b"II" else ">"
    (directory,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, directory)
    tags = {}
    for at in range(directory + 2, directory + 2 + 12 * min(count, MAX_TAGS), 12):
        tag, kind = struct.unpack_from(order + "HH", data, at)
        if tag in (TIFF_WIDTH, TIFF_HEIGHT, TIFF_ORIENTATION):
            (tags[tag],) = struct.unpack_from(order + ("H" if kind == 3 else "I"), data, at + 8)
    orientation = tags.get(TIFF_ORIENTATION, 1)
    return Probe(
        "TIFF",
        tags[TIFF_HEIGHT],
        tags[TIFF_WIDTH],
        "",
        orientation if 1 <= orientation <= 8 else 1,
        None,
    )


def _read_webp_header(data: Encoded) -> Probe:
    """Canvas and orientation from the chunks. Pillow would allocate the canvas to open the file."""
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
        "WEBP", size[1], size[0], "RGBA" if alpha else "RGB", _orientation(notes), max(1, frames)
    )


REDUCERS: dict[str, Callable[[Encoded], bytes]] = {
    "JPEG": _jpeg_header,
    "PNG": _png_header,
    "GIF": _first_bytes,
    "BMP": _first_bytes,
    "AVIF": _all_bytes,
    "HEIF": _all_bytes,
}
"""What bounds the work of Pillow's parsers, which are Python loops, on a file made of nothing but
headers. libavif and libheif are left to the worker's limits: they give up early on bytes that are
mostly header.
"""
READERS: dict[str, Callable[[Encoded], Probe]] = {
    "TIFF": _read_tiff_header,
    "WEBP": _read_webp_header,
}
"""Formats whose headers are read here, without Pillow."""
