"""Encoded bytes to the uint8 RGB pixels of a recipe, exactly as by Hugging Face's processors from a
PIL image. Runs in image workers only.

The reference is `PIL.Image.open` -> `ImageOps.exif_transpose` -> RGB -> torch's antialiased
bicubic, bilinear or Lanczos on uint8. The last is the call that
`torchvision.transforms.v2.functional.resize` makes. (Lanczos since torchvision 0.27. Before, and on
GPUs, transformers' `TorchvisionBackend.resize` takes bicubic in its place.) Processors which resize
by Pillow alone get Pillow's resizing. RGB is what transformers' image processor makes from a PIL
image: transparency (an alpha channel, a tRNS chunk) is laid over white. (transformers'
`load_image(url)` drops the alpha channel instead, unlike Saccade.) Decoding at a reduced size
(JPEG's draft mode) would change pixels, so it is never done.

Pillow decodes here too, except for RGB and grey JPEG and for 8-bit RGB(A) PNG. simplejpeg and
libspng decode these to the same pixels in less time. Every step after the decoder (orientation,
colour, the resize's horizontal pass) is done in strips, so a large image is in memory once.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import PIL.Image
import pyspng  # type: ignore[import-untyped]
import simplejpeg

from saccade.core.recipe import Box, ImageView, OwnPixels, PreprocessParams, Resample
from saccade.media.content import RAW_HEADER, RAW_MAGIC, to_rgb
from saccade.media.formats import heif, netpbm
from saccade.media.formats.header import jpeg_segments
from saccade.media.formats.header_parsers import MAX_PARTS, PNG_SIGNATURE
from saccade.media.formats.pixel_operations import RESAMPLERS, Pixels, own_module
from saccade.media.reasons import Undecodable

Strips = Callable[[int, int], Pixels]
"""RGB rows [top, bottom) of an upright image, [rows, width, 3]."""

PNG_START = len(PNG_SIGNATURE) + 25
"""Bytes up to the end of a PNG's first chunk, its header."""
PNG_PLAIN = {bytes([8, colours, 0, 0, 0]) for colours in (2, 6)}
"""Ends of headers of 8-bit RGB and RGBA images that are not interlaced."""
PNG_NOT_PLAIN = (b"", b"acTL", b"tRNS")
"""Chunks of images that are animated, or have a transparent colour; and the end of the file."""
PNG_END = bytes.fromhex("00000000 49454e44 ae426082")

JPEG_END = b"\xff\xd9"
JPEG_MARK = re.compile(rb"\xff[\xd9\xda]")
"""The end of a JPEG, or the begin of a scan."""
MAX_SCANS = 100
"""Maximum scans of a progressive JPEG; encoders write about ten. Each costs a pass over the image.
"""

STRIP_PIXELS = 1 << 20
"""Pixels of the source that are converted and resized at a time."""

BACKWARDS = (3, 4, 7, 8)
"""Orientations whose upright rows run against the stored rows, or columns."""

FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "ICO", "PPM"),
    *heif.FORMATS,
)


Target = tuple[Pixels, PreprocessParams]
"""A canvas [height, width, 3], and what is to lie on it."""


def decode_into(
    targets: Sequence[Target],
    data: memoryview,
    upright: tuple[int, int],
    orientation: int,
    regions: Sequence[Box | None] = (),
) -> None:
    """Write the image by each target's recipe on its canvas, with one decode for all targets.

    `upright` is the (height, width) that the header promised after orientation. regions: the part
    that each target shows, where some show a part alone. Raises Undecodable if the bytes hold
    another image.
    """
    canvas, recipe = targets[0]
    as_stored = len(targets) == 1 and recipe.plain and orientation == 1 and not regions
    if as_stored and upright == recipe.canvas and _decode_jpeg(data, canvas) is not None:
        return
    size, strips = decode(data, orientation)
    if size != upright:
        raise Undecodable("another size", upright[1], upright[0], size[1], size[0])
    if regions:
        _draw_regions(targets, regions, upright, strips)
    else:
        draw_into(targets, upright, strips)


def _draw_regions(
    targets: Sequence[Target],
    regions: Sequence[Box | None],
    upright: tuple[int, int],
    strips: Strips,
) -> None:
    """Write each region of the image by its targets' recipes, as if it were an image."""
    shown: dict[Box, list[Target]] = {}
    for target, region in zip(targets, regions, strict=True):
        shown.setdefault(region or Box(0, 0, *upright), []).append(target)
    for box, drawn in shown.items():
        draw_into(drawn, (box.bottom - box.top, box.right - box.left), _within(box, strips))


def _within(box: Box, strips: Strips) -> Strips:
    def strip(top: int, bottom: int) -> Pixels:
        rows = strips(box.top + top, box.top + bottom)
        return np.ascontiguousarray(rows[:, box.left : box.right])

    return strip


def decode(data: memoryview, orientation: int) -> tuple[tuple[int, int], Strips]:
    """Return the upright (height, width) of the first frame, and its pixels.

    Raises Undecodable if the bytes cannot be decoded.
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
            if netpbm.is_slow(image):
                return _strips_of_image(netpbm.load(image, data), 1)
            image.load()
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise what they please on malformed bytes
        raise Undecodable("truncated" if "truncated" in str(error) else "damaged") from error
    # Pillow turns TIFFs itself, as it loads them.
    return _strips_of_image(image, 1 if image.format == "TIFF" else orientation)


def _strips_of_array(pixels: Pixels) -> Strips:
    """Split upright RGB or RGBA pixels into strips."""

    def strip(top: int, bottom: int) -> Pixels:
        part = np.ascontiguousarray(pixels[top:bottom])
        return part if part.shape[2] == 3 else to_rgb(PIL.Image.fromarray(part))

    return strip


def _strips_of_image(image: PIL.Image.Image, orientation: int) -> tuple[tuple[int, int], Strips]:
    """Split an image into strips, reading rows or columns as stored before turning."""
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
    """Decode a YCbCr or grey JPEG to RGB, into `target` if given. Returns `None` for all else,
    damaged files included, which Pillow then reads.
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
    """Raise Undecodable if a JPEG has more scans than any encoder writes."""
    try:
        *_, (_, _, begin) = jpeg_segments(data)
    except (ValueError, IndexError):
        return  # damaged: Pillow reports it
    # In a scan's coded bytes 0xFF is followed by 0 or a restart marker.
    for number, mark in enumerate(JPEG_MARK.finditer(data, begin), 2):
        if mark.group() == JPEG_END:
            return
        if number > MAX_SCANS:
            raise Undecodable("scans", MAX_SCANS)


def _decode_png(data: memoryview) -> Pixels | None:
    """Decode a plain PNG to RGB or RGBA. Returns `None` for all else, damaged files included, which
    Pillow then reads.
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
    """Rebuild a plain 8-bit RGB or RGBA image as a file with only its header and pixels. Returns
    `None` for an interlaced, animated or damaged image.

    Other chunks stay away from libspng, which has had trouble with some. libspng ignores wrong
    checksums, so this function compares them.
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
            if last not in (0, at):  # the pixels are not contiguous
                return None
            first, last = first or at, end
        if kind in (b"IHDR", b"IDAT") and zlib.crc32(data[at + 4 : end - 4]) != int.from_bytes(
            data[end - 4 : end], "big"
        ):
            return None
        at = end
    return None


def turn(pixels: Pixels, orientation: int) -> Pixels:
    """Apply EXIF orientation (1 to 8) to [height, width, 3], as `ImageOps.exif_transpose` does."""
    if orientation >= 5:  # 5 transposes; 6, 7, 8 transpose and then flip
        pixels = pixels.transpose(1, 0, 2)
    if orientation in BACKWARDS:
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


@dataclass(frozen=True, slots=True, eq=False)
class Resizing:
    """The part of an upright image in `box`, to be resized to `pixels` [height, width, 3]."""

    pixels: Pixels
    box: Box
    resample: Resample = "bicubic"


def draw_into(targets: Sequence[Target], upright: tuple[int, int], strips: Strips) -> None:
    """Write the image by each target's recipe on its canvas."""
    if any(recipe.own for _, recipe in targets):
        strips = _strips_of_array(strips(0, upright[0]))  # all of it, once
    parts: list[Resizing] = []
    tiled: list[tuple[Pixels, ImageView, Pixels]] = []
    for canvas, recipe in targets:
        if recipe.own or recipe.through:
            _draw_in_turn(canvas, recipe, upright, strips)
            continue
        if recipe.fill is not None:
            canvas[:] = recipe.fill
        for view in recipe.views:
            pixels = _place(canvas, view)
            parts.append(Resizing(pixels, view.box or Box(0, 0, *upright), recipe.resample))
            if view.tiles:
                tiled.append((canvas, view, pixels))
    if parts:
        resize_into(parts, upright, strips)
    for canvas, view, pixels in tiled:
        for tile in view.tiles:
            (top, left), window = tile.at, tile.window
            cut = pixels[window.top : window.bottom, window.left : window.right]
            canvas[top : top + cut.shape[0], left : left + cut.shape[1]] = cut


def _draw_in_turn(
    canvas: Pixels, recipe: PreprocessParams, upright: tuple[int, int], strips: Strips
) -> None:
    """Write the image on its canvas by way of other images, each made from the one before."""
    if own := recipe.own:
        pixels = np.empty((*own.size, 3), np.uint8) if recipe.views else canvas
        _draw_own(own, pixels, strips(0, upright[0]))
        upright, strips = own.size, _strips_of_array(pixels)
    for size in recipe.through:
        pixels = np.empty((*size, 3), np.uint8)
        resize_into([Resizing(pixels, Box(0, 0, *upright), recipe.resample)], upright, strips)
        upright, strips = size, _strips_of_array(pixels)
    if recipe.views:
        draw_into([(canvas, replace(recipe, own=None, through=()))], upright, strips)


def _draw_own(own: OwnPixels, out: Pixels, pixels: Pixels) -> None:
    """Write what a family's own operation makes of an image. Raises Undecodable."""
    try:
        own_module(own).draw(out, own.argument, pixels)
    except ValueError as error:
        raise Undecodable("processor") from error


def _place(canvas: Pixels, view: ImageView) -> Pixels:
    """Return the target of a resized view: the canvas, or new memory if tiles are cut from it."""
    (height, width), (top, left) = view.size, view.at
    if view.tiles:
        return np.empty((height, width, 3), np.uint8)
    return canvas[top : top + height, left : left + width]


def resize_into(parts: Sequence[Resizing], upright: tuple[int, int], strips: Strips) -> None:
    """Resize parts of the image, bit-exact to torchvision's antialiased uint8 resize or to
    Pillow's.

    Resizing by torch takes rows first and columns of the uint8 result next. The first pass knows
    one row at a time, so strips change nothing. Pillow begins with what leaves less, so it gets all
    rows.
    """
    height, width = upright
    step = max(1, STRIP_PIXELS // width)
    if step >= height or not all(RESAMPLERS[part.resample].by_strips for part in parts):
        image = strips(0, height)
        for part in parts:
            box = part.box
            resize(part.pixels, image[box.top : box.bottom, box.left : box.right], part.resample)
        return
    narrow = [_narrow(part) for part in parts]
    for first in range(0, height, step):
        last = min(height, first + step)
        image = strips(first, last)
        for part, rows in zip(parts, narrow):
            box = part.box
            top, bottom = max(first, box.top), min(last, box.bottom)
            if top < bottom:
                strip = image[top - first : bottom - first, box.left : box.right]
                resize(rows[top - box.top : bottom - box.top], strip, part.resample)
    for part, rows in zip(parts, narrow, strict=True):
        if rows is not part.pixels:
            resize(part.pixels, rows, part.resample)


def _narrow(part: Resizing) -> Pixels:
    """Allocate a part with its width resized and its height still as in the box."""
    height, width, _ = part.pixels.shape
    rows = part.box.bottom - part.box.top
    return part.pixels if height == rows else np.empty((rows, width, 3), np.uint8)


def resize(target: Pixels, pixels: Pixels, resample: Resample = "bicubic") -> None:
    if pixels.shape == target.shape:
        target[:] = pixels
    else:
        RESAMPLERS[resample].resize(target, pixels)
