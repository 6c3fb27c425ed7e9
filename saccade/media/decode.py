"""Encoded bytes to resized uint8 RGB pixels, exactly as Hugging Face's torchvision backend makes
them. Runs in decode workers only.

The reference is: `PIL.Image.open` -> `ImageOps.exif_transpose` -> `convert("RGB")` -> torch's
antialiased bicubic on uint8, which is the call `torchvision.transforms.v2.functional.resize` makes.
Pillow does the first three here too, except for RGB and grey JPEG and for 8-bit RGB(A) PNG, which
simplejpeg and libspng decode to the same pixels in less time. Knows nothing of processes, keys or
families.
"""

from __future__ import annotations

import io
import warnings
import zlib

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps
import pyspng  # type: ignore[import-untyped]
import simplejpeg

from saccade.media.content import MAX_PARTS, PNG_SIGNATURE, RAW_HEADER, RAW_MAGIC

Pixels = npt.NDArray[np.uint8]

PNG_START = len(PNG_SIGNATURE) + 25
"""Bytes up to the end of a PNG's first chunk, its header."""
PNG_PLAIN = {bytes([8, colours, 0, 0, 0]) for colours in (2, 6)}
"""Ends of headers of 8-bit RGB and RGBA pictures that are not interlaced."""
PNG_END = bytes.fromhex("00000000 49454e44 ae426082")

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")


def decode_into(
    target: Pixels, data: memoryview, upright: tuple[int, int], orientation: int
) -> None:
    """Write the picture, resized to the target's [height, width, 3], into `target`.

    `upright` is the (height, width) that the header promised after orientation. Raises ValueError,
    saying why, when the bytes do not hold that picture.
    """
    if upright == target.shape[:2] and orientation == 1 and _decode_jpeg(data, target) is not None:
        return
    pixels = decode(data, orientation)
    if pixels.shape[:2] != upright:
        raise ValueError(
            f"its header promised {upright[1]} x {upright[0]} px, its content has "
            f"{pixels.shape[1]} x {pixels.shape[0]}"
        )
    resize_into(target, pixels)


def decode(data: memoryview, orientation: int) -> Pixels:
    """Upright RGB pixels [height, width, 3] of the first frame.

    Raises ValueError when the bytes cannot be decoded.
    """
    if bytes(data[: len(RAW_MAGIC)]) == RAW_MAGIC:
        _, height, width = RAW_HEADER.unpack_from(data)
        return np.frombuffer(data, np.uint8, offset=RAW_HEADER.size).reshape(height, width, 3)
    pixels = _decode_jpeg(data, None)
    if pixels is None:
        pixels = _decode_png(data)
    if pixels is not None:
        return turn(pixels, orientation)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return np.asarray(PIL.ImageOps.exif_transpose(image).convert("RGB"))
    except MemoryError:
        raise
    except PIL.UnidentifiedImageError:  # its own words show the address of a Python object
        raise ValueError("it is damaged or cut short") from None
    except Exception as error:  # Pillow's plugins raise what they please on malformed bytes
        raise ValueError(str(error) or type(error).__name__) from error


def _decode_jpeg(data: memoryview, target: Pixels | None) -> Pixels | None:
    """RGB pixels of a YCbCr or grey JPEG, written to `target` if given; None for all else, damaged
    files included: those are Pillow's.
    """
    if bytes(data[:3]) != b"\xff\xd8\xff":
        return None
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


def _decode_png(data: memoryview) -> Pixels | None:
    """RGB pixels of a plain PNG; None for all else, damaged files included: those are Pillow's."""
    plain = _plain_png(data)
    if plain is None:
        return None
    try:
        pixels: Pixels = pyspng.load(plain)
    except RuntimeError:
        return None
    return pixels[..., :3]


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
        if (kind == b"IHDR") != (end == PNG_START) or kind in (b"", b"acTL"):
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
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def resize_into(target: Pixels, pixels: Pixels) -> None:
    """Resize [height, width, 3] into `target`, bit-exact to torchvision's uint8 bicubic with
    antialias.
    """
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
