"""What encoded bytes are, without decoding them: digest, header, key, size after resizing, token
count.

Only headers are read here, in the front itself; the price is microseconds whatever the picture
claims to be. Decoding, and all that can go wrong with it, belongs to the decode workers
(`media/decode.py`). Knows nothing of where the bytes came from.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps
from blake3 import blake3
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
)

from saccade.core.errors import ImageError
from saccade.core.family import FamilySpec, ImageRules
from saccade.core.types import Image, ImageKey

Detail = Literal["auto", "low", "high"]

LOW_DETAIL_PIXELS = 512 * 512
"""OpenAI's `detail: "low"` looks at a picture at 512 x 512."""

RAW_HEADER = struct.Struct("<8sII")
RAW_MAGIC = b"\x93SACRAW\n"
"""Our own format for pixels that enter behind the front: this magic, height, width, then RGB bytes.
"""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_NOTES = {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}  # may also follow the pixels
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

GIF_PREFIX = 1 << 16
MAX_PARTS = 1 << 15
"""Most segments or chunks looked at: more than any camera writes, few enough to pass in
milliseconds.
"""
MAX_KEPT = 1 << 10
"""Most chunks handed to Pillow."""

MAX_NOTES = 1 << 18
"""Most bytes handed to Pillow; it takes time that grows with their square."""

AVIF_ITEMS, AVIF_TRACKS = 1 << 14, 1 << 16
"""Most bytes that may describe an AVIF's items, and all else but its pixels: libavif's time grows
with their square. (Colour profiles and other properties of items are not counted.)
"""

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
READABLE = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"


@dataclass(frozen=True, slots=True)
class Probe:
    """What the header says. `height` and `width` are in pixels as stored; `orientation` is EXIF's,
    1 to 8, 1 being upright.

    `frames` is None where counting them would mean reading the whole file; only the first is ever
    used.
    """

    format: str
    height: int
    width: int
    mode: str
    orientation: int
    frames: int | None

    @property
    def upright(self) -> tuple[int, int]:
        """(height, width) once the orientation is applied."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


@dataclass(frozen=True, slots=True)
class Budget:
    """One picture's own wishes for its size: OpenAI's `detail`, and bounds on height * width after
    resizing.
    """

    detail: Detail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None

    def apply(self, rules: ImageRules) -> ImageRules:
        """The rules this picture is resized by.

        Raises ImageError when the wishes contradict each other or the model's limit.
        """
        least, most = self.min_pixels, self.max_pixels
        if self.detail == "low" and most is None:
            most = min(LOW_DETAIL_PIXELS, rules.max_pixels)
        if least is None and most is None:
            return rules
        most = rules.max_pixels if most is None else most
        least = min(rules.min_pixels, most) if least is None else least
        if not rules.factor**2 <= most <= rules.max_pixels:
            raise ImageError(
                f"max_pixels is {most}; this model takes {rules.factor**2} to {rules.max_pixels}"
            )
        if not 0 < least <= most:
            raise ImageError(
                f"min_pixels is {least}; it must be above 0 and at most max_pixels, here {most}"
            )
        return replace(rules, min_pixels=least, max_pixels=most)


@dataclass(frozen=True, slots=True)
class Content:
    """A picture as the engine will know it, and the (height, width) its pixels are resized to."""

    image: Image
    size: tuple[int, int]


def digest(data: bytes) -> bytes:
    """blake3-256 of the encoded bytes.

    Lets go of the interpreter lock, so large bodies are best hashed on a thread.
    """
    return blake3(data).digest()


def identify(digest: bytes, probe: Probe, budget: Budget, salt: str, spec: FamilySpec) -> Content:
    """Name a picture and say what it will cost.

    Raises ImageError on a budget or an aspect ratio out of bounds.
    """
    rules = budget.apply(spec.image_rules)
    height, width = spec.image_size(*probe.upright, rules)
    grid = spec.grid(height, width)
    key = ImageKey(digest, rules.fingerprint(spec.family), salt)
    return Content(Image(key, grid, spec.num_tokens(grid)), (height, width))


def probe(data: bytes, max_pixels: int) -> Probe:
    """Read a header.

    Raises ImageError when the bytes are no picture we read, are cut short, or claim more than
    `max_pixels`.
    """
    if not data:
        raise ImageError("the picture is empty (0 bytes)")
    kind = sniff(data)
    if kind is None:
        raise ImageError(f"the picture is {_what_else(data)}; pictures must be {READABLE}")
    try:
        found = _read_header(kind, data)
    except Exception as error:  # a parser's way to say "malformed" is any exception at all
        raise ImageError(
            f"the picture starts like a {kind} but its header cannot be read: it is damaged or "
            "cut short"
        ) from error
    pixels = found.height * found.width
    if pixels < 1:
        raise ImageError(
            f"the picture is {found.width} x {found.height} px: there is nothing to see"
        )
    if pixels > max_pixels:
        raise ImageError(
            f"the picture is {found.width} x {found.height} px ({pixels / 1e6:.0f} Mpx); the "
            f"limit is {max_pixels / 1e6:.0f} Mpx: "
            "resize it, or start the server with a larger --max-image-pixels",
            code="image_too_large",
        )
    return found


def sniff(data: bytes) -> str | None:
    """The format by its first bytes, None when it is none of ours."""
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
    if head.startswith(RAW_MAGIC):
        return "RAW"
    if head[:2] == b"BM":
        return "BMP"
    return None


def _what_else(data: bytes) -> str:
    """For an error message: what these bytes are, if not a picture."""
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in start:
        return "an SVG drawing"
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if start.startswith(b"%pdf"):
        return "a PDF document"
    if start[4:8] == b"ftyp":
        return "a HEIC picture or a video"
    is_text = all(byte >= 32 or byte in b"\t\r\n" for byte in start) and "\ufffd" not in start[
        :-3
    ].decode(errors="replace")
    return "text" if is_text else "in no format we know"


def _read_header(kind: str, data: bytes) -> Probe:
    reduce = REDUCERS.get(kind)
    # Pillow warns of odd EXIF data; on the event loop's thread only, so the filter is ours alone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind in READERS:
            return READERS[kind](data)
        with OPENERS[kind](io.BytesIO(reduce(data) if reduce else data)) as image:
            width, height = image.size
            return Probe(kind, height, width, image.mode, _orientation(image), _frames(image))


def _orientation(image: PIL.Image.Image) -> int:
    """EXIF's, or XMP's.

    Pillow's own PNG method would decode the picture to look for more: the header we made has it
    all.
    """
    found = PIL.Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _frames(image: ImageFile.ImageFile) -> int | None:
    if isinstance(image, (PngImagePlugin.PngImageFile, AvifImagePlugin.AvifImageFile)):
        return int(image.n_frames)
    return None if isinstance(image, GifImagePlugin.GifImageFile) else 1


def _jpeg_header(data: bytes) -> bytes:
    """The segments up to the first scan that say anything about size, mode and orientation."""
    kept = [data[:2]]
    at, room = 2, MAX_NOTES
    for _ in range(MAX_PARTS):
        if data[at] != 0xFF or data[at + 1] in (
            0x00,
            0xFF,
        ):  # padding and stray bytes between segments are allowed
            at += 1
            continue
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == JPEG_SCAN or (
            marker in JPEG_SEGMENTS and len(kept) < MAX_KEPT and end - at <= room
        ):
            kept.append(data[at:end])
            room -= end - at
        if marker == JPEG_SCAN:
            return b"".join(kept)
        at = end
    raise ValueError("too many segments before the first scan")


def _png_header(data: bytes) -> bytes:
    """The chunks that say anything about size, mode, orientation and frames, wherever they stand,
    around an empty picture.
    """
    kept = [PNG_SIGNATURE]
    wanted = PNG_CHUNKS
    at, room = len(PNG_SIGNATURE), MAX_NOTES
    for _ in range(MAX_PARTS):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 12 + length
        if kind in wanted and len(kept) < MAX_KEPT and end - at <= room:
            kept.append(data[at:end])
            room -= end - at
        if kind == b"IDAT":
            wanted = PNG_NOTES
        if kind in (b"IEND", b""):
            break
        at = end
    return b"".join(kept) + PNG_EMPTY


def _gif_header(data: bytes) -> bytes:
    return data[:GIF_PREFIX]


def _avif_header(data: bytes) -> bytes:
    """The same bytes. Raises ValueError when they describe more than pictures have."""
    items = tracks = 0
    for kind, start, end in _boxes(data, 0, len(data)):
        if kind == b"meta":
            items += end - start
            for inner, at, to in _boxes(data, start + 4, end):  # after version and flags
                held = _boxes(data, at, to) if inner == b"iprp" else ()
                items -= (
                    to - at
                    if inner == b"idat"
                    else sum(b - a for kind, a, b in held if kind == b"ipco")
                )
        elif kind != b"mdat":
            tracks += end - start
    if items > AVIF_ITEMS or tracks > AVIF_TRACKS:
        raise ValueError("too much to describe one picture")
    return data


def _boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of the content of each box in a part of an ISO base media file (ISO
    14496-12).
    """
    for _ in range(MAX_PARTS):
        if at + 8 > end:
            return
        length, kind, start = (
            int.from_bytes(data[at : at + 4], "big"),
            data[at + 4 : at + 8],
            at + 8,
        )
        if length == 1:
            length, start = int.from_bytes(data[start : start + 8], "big"), start + 8
        stop = min(end, at + length) if length else end
        if stop < start:
            raise ValueError("a box that ends before it begins")
        yield kind, start, stop
        at = stop
    raise ValueError("too many boxes")


def _read_tiff_header(data: bytes) -> Probe:
    """Width, height and orientation from the first directory.

    Pillow would build a list of every strip to open the file.
    """
    order = "<" if data[:2] == b"II" else ">"
    (directory,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, directory)
    tags = {}
    for at in range(directory + 2, directory + 2 + 12 * count, 12):
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


def _read_webp_header(data: bytes) -> Probe:
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


REDUCERS: dict[str, Callable[[bytes], bytes]] = {
    "JPEG": _jpeg_header,
    "PNG": _png_header,
    "GIF": _gif_header,
    "AVIF": _avif_header,
}
"""What bounds the work of Pillow's parsers, which are Python loops, on a file made of nothing but
headers.
"""


def encode_array(pixels: npt.NDArray[np.uint8]) -> bytes:
    """RGB pixels [height, width, 3] as bytes of our own format, for pictures that enter behind the
    front.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ImageError(
            f"an array must be uint8 [height, width, 3], not {pixels.dtype} {list(pixels.shape)}"
        )
    height, width, _ = pixels.shape
    return RAW_HEADER.pack(RAW_MAGIC, height, width) + pixels.tobytes()


def encode_image(image: PIL.Image.Image) -> bytes:
    """A Pillow image, upright and in RGB, as bytes of our own format."""
    return encode_array(np.asarray(PIL.ImageOps.exif_transpose(image).convert("RGB")))


def _read_raw_header(data: bytes) -> Probe:
    if len(data) < RAW_HEADER.size:
        raise ValueError("cut short")
    _, height, width = RAW_HEADER.unpack_from(data)
    if len(data) != RAW_HEADER.size + 3 * height * width:
        raise ValueError("cut short")
    return Probe("RAW", height, width, "RGB", 1, 1)


READERS: dict[str, Callable[[bytes], Probe]] = {
    "TIFF": _read_tiff_header,
    "WEBP": _read_webp_header,
    "RAW": _read_raw_header,
}
"""Formats whose headers are read here, without Pillow."""
