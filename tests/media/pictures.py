"""Pictures for the tests of the picture path: content, encodings of every kind, and the reference
that decodes and resizes them.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps

from saccade_bench.image_files import save

Pixels = npt.NDArray[np.uint8]
encode = save


def photo(height: int, width: int, seed: int = 0) -> Pixels:
    """Smooth colours with some grain, [height, width, 3]."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(
        PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.Resampling.BICUBIC),
        dtype=np.int16,
    )
    return np.clip(smooth + rng.integers(-6, 7, smooth.shape), 0, 255).astype(np.uint8)


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def with_orientation(pixels: Pixels, orientation: int, format: str, **options: Any) -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return encode(pixels, format, exif=exif.tobytes(), **options)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    height: int, width: int, data: bytes, mode: int = 2, before: bytes = b"", after: bytes = b""
) -> bytes:
    """A PNG file of hand-made parts: `data` is what is compressed, `before` and `after` are chunks
    around it.
    """
    header = struct.pack(">IIBBBBB", width, height, 8, mode, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(data))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + body + after + chunk(b"IEND", b"")
    )


def decoded(data: bytes) -> Pixels:
    """As transformers' processor does it with a PIL image: upright RGB [height, width, 3],
    transparency laid over white.
    """
    with PIL.Image.open(io.BytesIO(data)) as image:
        upright = PIL.ImageOps.exif_transpose(image)
        if "A" in upright.getbands() or upright.info.get("transparency") is not None:
            white = PIL.Image.new("RGBA", upright.size, (255, 255, 255, 255))
            upright = PIL.Image.alpha_composite(white, upright.convert("RGBA"))
        return np.array(upright.convert("RGB"))


def resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """As transformers' torchvision backend does it: the uint8 tensor [1, 3, height, width], bicubic
    with antialias.
    """
    import torch

    image = torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()
    if pixels.shape[:2] == size:
        return pixels
    result: Pixels = (
        torch.nn.functional.interpolate(
            image, size, mode="bicubic", antialias=True, align_corners=False
        )[0]
        .permute(1, 2, 0)
        .numpy()
    )
    return result
