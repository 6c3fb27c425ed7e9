"""Reads an image's header: format, size, orientation and number of frames. Runs in image workers
only.

The bytes may be hostile, and some parsers are written in C or take quadratic time. So headers are
read in a process that may crash, and Pillow gets only the parts that specify size, mode and
orientation. Compressed text, repeated metadata, and excessive numbers of segments are left out.
Some formats are parsed without Pillow (`header_parsers.py`). The worker has a CPU time limit for
parsers that still take long.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
)

from saccade.media.content import RAW_MAGIC, Probe, check_pixels, read_raw
from saccade.media.formats import heif
from saccade.media.formats.header_parsers import (
    JP2_SIGNATURE,
    JPEG_2000_CODESTREAM,
    MAX_PARTS,
    PARSERS,
    PNG_SIGNATURE,
    Encoded,
    exif_orientation,
)
from saccade.media.reasons import READS_HEIC, Unreadable

PNG_TEXTS = {b"tEXt", b"zTXt", b"iTXt"}
PNG_ORIENTED = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
"""Keywords of text chunks that may contain an orientation. All other text chunks are ignored."""
PNG_METADATA_CHUNKS = PNG_TEXTS | {b"eXIf"}  # may also follow the pixels
PNG_CHUNKS = PNG_METADATA_CHUNKS | {b"IHDR", b"PLTE", b"tRNS", b"acTL"}
PNG_EMPTY = bytes.fromhex(
    "0000000049444154 35af061e 0000000049454e44 ae426082"
)  # empty IDAT and IEND chunks

JPEG_SCAN = 0xDA
JPEG_SEGMENTS = {0xE0, 0xE1, 0xEE, JPEG_SCAN} | set(range(0xC0, 0xD0)) - {
    0xC4,
    0xC8,
    0xCC,
}  # JFIF, EXIF and XMP, Adobe, scan, frame

PREFIX_BYTES = 1 << 16
"""The number of bytes of a GIF, BMP or PPM file that are passed to Pillow."""
MAX_KEPT = 1 << 10
"""Maximum chunks passed to Pillow."""
MAX_METADATA_BYTES = 1 << 18
"""Maximum metadata bytes passed to Pillow, whose time is quadratic in them."""
Opener = Callable[[io.BytesIO], ImageFile.ImageFile]

# Classes instead of `PIL.Image.open`, which tries forty formats and has its own pixel limit.
OPENERS: dict[str, Opener] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}
if READS_HEIC:
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
NETPBM = re.compile(rb"P[1-6f]\s+(\d|#)")
"""The pattern includes the characters after the magic number, since "P1" alone could also start a
text.
"""


def probe(data: Encoded, max_pixels: int) -> Probe:
    """Return an image's header.

    Raises Unreadable if the bytes are not a supported image, are truncated, or specify more than
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
    if kind == "HEIF" and not READS_HEIC:
        raise Unreadable("no heic")
    try:
        return _read_header(kind, data)
    except Exception as error:  # parsers raise any exception for malformed data
        raise Unreadable(f"bad header: {kind}") from error


def sniff(data: Encoded) -> str | None:
    """Return the format according to the file's first bytes, or None if it is unknown."""
    head = data[:16]
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(PNG_SIGNATURE):
        return "PNG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):  # TIFF, BigTIFF
        return "TIFF"
    if head.startswith((JP2_SIGNATURE, JPEG_2000_CODESTREAM)):
        return "JPEG2000"
    if head[4:12] in (b"ftypavif", b"ftypavis"):
        return "AVIF"
    if heif.is_heic(data[:64]):
        return "HEIF"
    if head[:2] == b"BM":
        return "BMP"
    if head[:4] == b"\0\0\1\0" and head[5:6] == b"\0" != head[4:5]:  # 1 to 255 images
        return "ICO"
    if NETPBM.match(head):
        return "PPM"
    return None


def _what_else(data: Encoded) -> str:
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
    if head[:2] == b"\x1f\x8b":
        return "gzip-compressed"
    if head[4:8] == b"ftyp":
        return "a HEIF image of another codec than HEVC"
    is_text = all(byte >= 32 or byte in b"\t\r\n" for byte in start) and "\ufffd" not in start[
        :-3
    ].decode(errors="replace")
    return "text" if is_text else "in an unknown format"


def _video(head: bytes) -> str | None:
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
        if kind in PARSERS:
            return PARSERS[kind](data)
        with OPENERS[kind](io.BytesIO(REDUCERS[kind](data))) as image:
            width, height = image.size
            return Probe(kind, height, width, image.mode, exif_orientation(image), _frames(image))


def _frames(image: ImageFile.ImageFile) -> int | None:
    if isinstance(image, (PngImagePlugin.PngImageFile, AvifImagePlugin.AvifImageFile)):
        return int(image.n_frames)
    return None if isinstance(image, GifImagePlugin.GifImageFile) else 1


def jpeg_segments(data: Encoded | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) for each JPEG segment, up to the first scan.

    Raises ValueError or IndexError if there is no scan.
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
    """Return the JPEG with only the segments that specify size, mode and orientation, up to the
    first scan.
    """
    kept = [data[:2]]
    left = MAX_METADATA_BYTES
    for marker, at, end in jpeg_segments(data):
        if marker == JPEG_SCAN or (
            marker in JPEG_SEGMENTS and len(kept) < MAX_KEPT and end - at <= left
        ):
            kept.append(data[at:end])
            left -= end - at
    return b"".join(kept)


def _png_header(data: Encoded) -> bytes:
    """Return the PNG with only the chunks that specify size, mode, orientation and frames, and an
    empty image.

    Such chunks may also follow the pixels.
    """
    kept = [PNG_SIGNATURE]
    wanted = PNG_CHUNKS
    texts: set[bytes] = set()
    at, left = len(PNG_SIGNATURE), MAX_METADATA_BYTES
    for _ in range(MAX_PARTS):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 12 + length
        if kind in wanted and len(kept) < MAX_KEPT and end - at <= left:
            part = data[at:end]
            keyword = part[8 : part.find(b"\0", 8) + 1]
            if kind not in PNG_TEXTS or (keyword in PNG_ORIENTED and keyword not in texts):
                kept.append(part)
                left -= end - at
                texts.add(keyword)
        if kind == b"IDAT":
            wanted = PNG_METADATA_CHUNKS
        if kind in (b"IEND", b""):
            break
        at = end
    return b"".join(kept) + PNG_EMPTY


def _first_bytes(data: Encoded) -> bytes:
    return data[:PREFIX_BYTES]


def _all_bytes(data: Encoded) -> bytes:
    return data[:]


REDUCERS: dict[str, Callable[[Encoded], bytes]] = {
    "JPEG": _jpeg_header,
    "PNG": _png_header,
    "GIF": _first_bytes,
    "BMP": _first_bytes,
    "PPM": _first_bytes,
    "AVIF": _all_bytes,
    "HEIF": _all_bytes,
}
"""Functions that reduce a file to the parts that Pillow needs for the header. This bounds the time
of Pillow's parsers, which are Python loops, for a file that consists of headers. AVIF and HEIF
files are not
reduced: libavif and libheif give up early on such files, and the worker has a time limit.
"""
