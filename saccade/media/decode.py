"""Encoded bytes to resized uint8 RGB pixels, exactly as Hugging Face's processors make them of a
PIL image. Runs in image workers only.

The reference is: `PIL.Image.open` -> `ImageOps.exif_transpose` -> RGB -> torch's antialiased
bicubic on uint8, which is the call `torchvision.transforms.v2.functional.resize` makes. RGB means
what transformers' image processor makes of a PIL image: transparency (an alpha channel, a tRNS
chunk) is laid over white. (transformers' `load_image(url)`, its other way, drops the alpha channel
instead; that one is not ours.) Decoding at a reduced size (JPEG's draft mode) would change pixels:
never done.

Pillow decodes here too, except for RGB and grey JPEG and for 8-bit RGB(A) PNG, which simplejpeg and
libspng decode to the same pixels in less time. Whatever follows the decoder (orientation, colour,
the resize's horizontal pass) is done by strips, so that a large image is held once. Knows nothing
of processes, keys or families.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import PIL.Image
import pyspng  # type: ignore[import-untyped]
import simplejpeg

from saccade.media.content import RAW_HEADER, RAW_MAGIC, to_rgb
from saccade.media.header import MAX_PARTS, PNG_SIGNATURE, jpeg_segments

Pixels = npt.NDArray[np.uint8]
Strips = Callable[[int, int], Pixels]
"""RGB rows [top, bottom) of an upright image, [rows, width, 3]."""

PNG_START = len(PNG_SIGNATURE) + 25
"""Bytes up to the end of a PNG's first chunk, its header."""
PNG_PLAIN = {bytes([8, colours, 0, 0, 0]) for colours in (2, 6)}
"""Ends of headers of 8-bit RGB and RGBA pictures that are not interlaced."""
PNG_NOT_PLAIN = (b"", b"acTL", b"tRNS")
"""Chunks of pictures that are animated, or have a transparent colour; and the end of the file."""
PNG_END = bytes.fromhex("00000000 49454e44 ae426082")

JPEG_END = b"\xff\xd9"
JPEG_MARK = re.compile(rb"\xff[\xd9\xda]")
"""The end of a JPEG, or the begin of a scan."""
MAX_SCANS = 100
"""Most scans of a progressive JPEG; encoders write about ten. Each costs a pass over the image."""

STRIP_PIXELS = 1 << 20
"""Pixels of the source that are converted and resized at a time."""

BACKWARDS = (3, 4, 7, 8)
"""Orientations whose upright rows run against the stored rows, or columns."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")


def decode_into(
    targets: Sequence[Pixels], data: memoryview, upright: tuple[int, int], orientation: int
) -> None:
    """Write the image, resized to each target's [height, width, 3], into `targets`: one decode for
    all of them.

    `upright` is the (height, width) that the header promised after orientation. Raises ValueError,
    saying why, when the bytes do not hold that image.
    """
    as_stored = len(targets) == 1 and upright == targets[0].shape[:2] and orientation == 1
    if as_stored and _decode_jpeg(data, targets[0]) is not None:
        return
    size, strips = decode(data, orientation)
    if size != upright:
        raise ValueError(
            f"its header promised {upright[1]} x {upright[0]} px, its content has "
            f"{size[1]} x {size[0]}"
        )
    resize_into(targets, upright, strips)


def decode(data: memoryview, orientation: int) -> tuple[tuple[int, int], Strips]:
    """The upright (height, width) of the first frame, and its pixels.

    Raises ValueError when the bytes cannot be decoded.
    """
    if bytes(data[: len(RAW_MAGIC)]) == RAW_MAGIC:
        _, height, width = RAW_HEADER.unpack_from(data)
        raw = np.frombuffer(data, np.uint8, offset=RAW_HEADER.size).reshape(height, width, 3)
        return (height, width), _strips_of_array(raw)
    pixels = _decode_jpeg(data, None)
    if pixels is None:
        pixels = _decode_png(data)
    if pixels is not None:
        turned = turn(pixels, orientation)
        return turned.shape[:2], _strips_of_array(turned)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
            image.load()
    except MemoryError:
        raise
    except PIL.UnidentifiedImageError:  # its own words show the address of a Python object
        raise ValueError("it is damaged or cut short") from None
    except Exception as error:  # Pillow's plugins raise what they please on malformed bytes
        raise ValueError(str(error) or type(error).__name__) from error
    # Pillow turns TIFFs itself, as it loads them.
    return _strips_of_image(image, 1 if image.format == "TIFF" else orientation)


def _strips_of_array(pixels: Pixels) -> Strips:
    """Of upright RGB or RGBA pixels."""

    def strip(top: int, bottom: int) -> Pixels:
        part = np.ascontiguousarray(pixels[top:bottom])
        return part if part.shape[2] == 3 else to_rgb(PIL.Image.fromarray(part))

    return strip


def _strips_of_image(image: PIL.Image.Image, orientation: int) -> tuple[tuple[int, int], Strips]:
    """Of pixels as stored, which are turned."""
    width, height = image.size
    sideways = orientation >= 5
    length = width if sideways else height

    def strip(top: int, bottom: int) -> Pixels:
        backwards = orientation in BACKWARDS
        first, last = (length - bottom, length - top) if backwards else (top, bottom)
        box = (first, 0, last, height) if sideways else (0, first, width, last)
        return np.ascontiguousarray(turn(to_rgb(image.crop(box)), orientation))

    return ((width, height) if sideways else (height, width)), strip


def _decode_jpeg(data: memoryview, target: Pixels | None) -> Pixels | None:
    """RGB pixels of a YCbCr or grey JPEG, written to `target` if given; None for all else, damaged
    files included: those are Pillow's.
    """
    if bytes(data[:3]) != b"\xff\xd8\xff":
        return None
    check_scans(data)
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if colorspace not in ("YCbCr", "Gray") or (
            target is not None and target.shape[:2] != (height, width)
        ):
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(
            data, "RGB", fastdct=False, fastupsample=False, buffer=target
        )
    except ValueError:
        return None
    return pixels


def check_scans(data: memoryview) -> None:
    """Raises ValueError for a JPEG of more scans than any encoder writes."""
    try:
        *_, (_, _, begin) = jpeg_segments(data)
    except (ValueError, IndexError):
        return  # damaged: Pillow's to say
    # In a scan's coded bytes 0xFF is followed by 0 or a restart marker.
    for number, mark in enumerate(JPEG_MARK.finditer(data, begin), 2):
        if mark.group() == JPEG_END:
            return
        if number > MAX_SCANS:
            raise ValueError(f"it has more than {MAX_SCANS} scans: save it again")


def _decode_png(data: memoryview) -> Pixels | None:
    """RGB or RGBA pixels of a plain PNG; None for all else, damaged files included: those are
    Pillow's.
    """
    plain = _plain_png(data)
    if plain is None:
        return None
    try:
        pixels: Pixels = pyspng.load(plain)
    except RuntimeError:
        return None
    return pixels


def _plain_png(data: memoryview) -> bytes | None:
    """Header and pixels of an 8-bit RGB or RGBA picture that is neither interlaced nor animated, as
    a file of nothing else.

    No other chunk reaches libspng, which has had trouble with some. It takes no notice of wrong
    checksums: they are compared here.
    """
    if bytes(data[: len(PNG_SIGNATURE)]) != PNG_SIGNATURE or bytes(data[24:29]) not in PNG_PLAIN:
        return None
    at, first, last = len(PNG_SIGNATURE), 0, 0
    for _ in range(MAX_PARTS):
        kind, end = bytes(data[at + 4 : at + 8]), at + 12 + int.from_bytes(data[at : at + 4], "big")
        if kind == b"IEND":
            return b"".join((data[:PNG_START], data[first:last], PNG_END)) if last else None
        if (kind == b"IHDR") != (end == PNG_START) or kind in PNG_NOT_PLAIN:
            return None
        if kind == b"IDAT":
            if last not in (0, at):  # something stands between the pixels
                return None
            first, last = first or at, end
        if kind in (b"IHDR", b"IDAT") and zlib.crc32(data[at + 4 : end - 4]) != int.from_bytes(
            data[end - 4 : end], "big"
        ):
            return None
        at = end
    return None


def turn(pixels: Pixels, orientation: int) -> Pixels:
    """Apply an EXIF orientation (1 to 8) to [height, width, 3], as `ImageOps.exif_transpose`
    does.
    """
    if orientation >= 5:  # 5 transposes; 6, 7, 8 transpose and then flip
        pixels = pixels.transpose(1, 0, 2)
    if orientation in BACKWARDS:
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def resize_into(targets: Sequence[Pixels], upright: tuple[int, int], strips: Strips) -> None:
    """Resize the image to each target's [height, width, 3], bit-exact to torchvision's uint8
    bicubic with antialias.

    torch resizes rows first and columns of the uint8 result next. The first pass knows one row at a
    time, so doing it by strips changes nothing.
    """
    height, width = upright
    step = max(1, STRIP_PIXELS // width)
    if step >= height:
        pixels = strips(0, height)
        for target in targets:
            resize(target, pixels)
        return
    narrow = [
        target if target.shape[0] == height else np.empty((height, target.shape[1], 3), np.uint8)
        for target in targets
    ]
    for top in range(0, height, step):
        bottom = min(height, top + step)
        pixels = strips(top, bottom)
        for rows in narrow:
            resize(rows[top:bottom], pixels)
    for target, rows in zip(targets, narrow, strict=True):
        if rows is not target:
            resize(target, rows)


def resize(target: Pixels, pixels: Pixels) -> None:
    # here, not above: every module of this room imports without it; the worker has loaded it before
    # its first job
    import torch

    if pixels.shape == target.shape:
        target[:] = pixels
        return
    image = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))[None].permute(
        0, 3, 1, 2
    )  # [1, 3, H, W] over channels-last memory
    resized = torch.nn.functional.interpolate(
        image, size=target.shape[:2], mode="bicubic", antialias=True, align_corners=False
    )
    target[:] = resized[0].permute(1, 2, 0).numpy()
