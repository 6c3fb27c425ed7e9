"""Decodes an image and resizes it to uint8 RGB pixels, bit-identical to Hugging Face's processors
with a PIL image. Runs in image workers only.

The reference is `PIL.Image.open` -> `ImageOps.exif_transpose` -> RGB -> torch's antialiased
bicubic, bilinear or Lanczos interpolation on uint8, as called by
`torchvision.transforms.v2.functional.resize`. (Lanczos requires torchvision 0.27. With earlier
versions and on GPUs, transformers' `TorchvisionBackend.resize` uses bicubic instead.) If a
processor supports only Pillow's resizing, Saccade uses Pillow too. The conversion to RGB is the
same as in transformers' image processors: transparency (an alpha channel or a tRNS chunk) is
blended over white. (transformers' `load_image(url)` drops the alpha channel instead.) JPEG's draft
mode, which decodes at a reduced size, is not used because it would change pixels.

Pillow decodes all images except RGB and grayscale JPEG and 8-bit RGB(A) PNG. simplejpeg and libspng
decode these to the same pixels in less time. Later steps (orientation, color conversion, the
horizontal resizing pass) work in strips, so that a large image is in memory only once.
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
from saccade.media.content import RAW_HEADER, RAW_MAGIC
from saccade.media.formats import heif, netpbm
from saccade.media.formats.header import jpeg_segments
from saccade.media.formats.header_parsers import MAX_PARTS, PNG_SIGNATURE
from saccade.media.formats.pixel_operations import RESAMPLERS, Pixels, own_module
from saccade.media.pillow_images import to_rgb
from saccade.media.reasons import Undecodable

Strips = Callable[[int, int], Pixels]
"""A function of (top, bottom) that returns these rows of an upright image, RGB [rows, width, 3]."""

PNG_START = len(PNG_SIGNATURE) + 25
"""The size of a PNG's signature and its first chunk, which is the header."""
PNG_PLAIN = {bytes([8, colours, 0, 0, 0]) for colours in (2, 6)}
"""The last bytes of a header, for 8-bit RGB and RGBA images without interlacing."""
PNG_NOT_PLAIN = (b"", b"acTL", b"tRNS")
"""Chunks that libspng must not get: of animated images, of images with a transparent color, and the
empty one at the end of a truncated file.
"""
PNG_END = bytes.fromhex("00000000 49454e44 ae426082")

JPEG_END = b"\xff\xd9"
JPEG_MARK = re.compile(rb"\xff[\xd9\xda]")
"""The end of a JPEG, or the start of a scan."""
MAX_SCANS = 100
"""Maximum scans of a progressive JPEG. Encoders write about ten, and each takes a pass over the
image.
"""

STRIP_PIXELS = 1 << 20
"""The number of source pixels that are converted and resized at a time."""

BACKWARDS = (3, 4, 7, 8)
"""EXIF orientations in which upright rows are in the reverse order of the stored rows or columns.
"""

FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "ICO", "PPM"),
    *heif.FORMATS,
)


Target = tuple[Pixels, PreprocessParams]
"""A canvas [height, width, 3], and the parameters for the image that is written to it."""


def decode_into(
    targets: Sequence[Target],
    data: memoryview,
    upright: tuple[int, int],
    orientation: int,
    regions: Sequence[Box | None] = (),
) -> None:
    """Decode an image once, and write it to the canvas of each target with the target's parameters.

    Raises Undecodable if the bytes cannot be decoded, or the decoded image has another size.

    upright: the (height, width) according to the header, after the orientation is applied.
    regions: for each target, the part of the upright image, or None for the full image. Empty if
        all targets show the full image.
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
    """Return the upright (height, width) of the first frame, and a function that returns its pixels
    in strips.

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
    except Exception as error:  # Pillow's plugins raise any exception for malformed bytes
        raise Undecodable("truncated" if "truncated" in str(error) else "damaged") from error
    # Pillow applies the orientation of TIFF images itself when it loads them.
    return _strips_of_image(image, 1 if image.format == "TIFF" else orientation)


def _strips_of_array(pixels: Pixels) -> Strips:
    def strip(top: int, bottom: int) -> Pixels:
        part = np.ascontiguousarray(pixels[top:bottom])
        return part if part.shape[2] == 3 else to_rgb(PIL.Image.fromarray(part))

    return strip


def _strips_of_image(image: PIL.Image.Image, orientation: int) -> tuple[tuple[int, int], Strips]:
    """Return an image's upright size, and a function that returns upright strips of it.

    Each strip is cropped from the stored rows or columns before it is rotated.
    """
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
    """Decode a YCbCr or grayscale JPEG to RGB, into `target` if it is not None.

    Returns None for all other images and for damaged files, which Pillow then decodes.
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
        return  # damaged, which Pillow will report
    # In a scan's data, 0xFF is followed by 0 or a restart marker, so other markers can be searched.
    for number, mark in enumerate(JPEG_MARK.finditer(data, begin), 2):
        if mark.group() == JPEG_END:
            return
        if number > MAX_SCANS:
            raise Undecodable("scans", MAX_SCANS)


def _decode_png(data: memoryview) -> Pixels | None:
    """Decode an 8-bit PNG to RGB or RGBA.

    Returns None for all other images and for damaged files, which Pillow then decodes.
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
    """Return an 8-bit RGB or RGBA image as a PNG file with only its header and pixels.

    Returns None if it has another format, or is interlaced, animated or damaged. Other chunks are
    removed because libspng has had bugs with some. Checksums are verified because libspng ignores
    wrong ones.
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
    """Apply an EXIF orientation (1 to 8) to pixels [height, width, 3], as `ImageOps.exif_transpose`
    does.
    """
    if orientation >= 5:  # 5 transposes; 6, 7, 8 transpose and then flip
        pixels = pixels.transpose(1, 0, 2)
    if orientation in BACKWARDS:
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


@dataclass(frozen=True, slots=True, eq=False)
class Resizing:
    """A resize of the part `box` of an upright image into `pixels` [height, width, 3]."""

    pixels: Pixels
    box: Box
    resample: Resample = "bicubic"


def draw_into(targets: Sequence[Target], upright: tuple[int, int], strips: Strips) -> None:
    """Write an image to the canvas of each target, resized with the target's parameters."""
    if any(recipe.own for _, recipe in targets):
        strips = _strips_of_array(strips(0, upright[0]))  # compute the full image once
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
    """Write an image to its canvas in more than one step.

    First the family's operation runs, if there is one. Then the image is resized to intermediate
    sizes, and last to the views.
    """
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
    try:
        own_module(own).draw(out, own.argument, pixels)
    except ValueError as error:
        raise Undecodable("processor") from error


def _place(canvas: Pixels, view: ImageView) -> Pixels:
    """Return the array to resize a view into.

    It is a part of the canvas, or a new array if the view is split into tiles.
    """
    (height, width), (top, left) = view.size, view.at
    if view.tiles:
        return np.empty((height, width, 3), np.uint8)
    return canvas[top : top + height, left : left + width]


def resize_into(parts: Sequence[Resizing], upright: tuple[int, int], strips: Strips) -> None:
    """Resize parts of an image, bit-identical to torchvision's antialiased resize of uint8 or to
    Pillow's.

    torch resizes each row first, and then the columns of the uint8 result. Rows are independent, so
    working in strips does not change the result. Pillow may resize columns first, so it needs all
    rows at once.
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
    """Allocate the array for the first resizing pass of a part, which changes only the width."""
    height, width, _ = part.pixels.shape
    rows = part.box.bottom - part.box.top
    return part.pixels if height == rows else np.empty((rows, width, 3), np.uint8)


def resize(target: Pixels, pixels: Pixels, resample: Resample = "bicubic") -> None:
    if pixels.shape == target.shape:
        target[:] = pixels
    else:
        RESAMPLERS[resample].resize(target, pixels)
