"""Decodes PBM, PGM and PPM images that Pillow would decode in a Python loop. Runs in image workers
only.

These are text files, and files whose maximum value does not use the full range. The loop takes a
second for 0.1 Mpx. The pixels are identical to Pillow's.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import PIL.Image
from PIL import ImageFile

COMMENT = re.compile(rb"#[^\r\n]*[\r\n]?")
REST_OF_WORD = re.compile(rb"\S{0,32}")
SPACES = b" \t\n\v\f\r"
PART = 1 << 20
"""The number of bytes of text that are converted at a time, to bound temporary memory."""


def is_slow(image: ImageFile.ImageFile) -> bool:
    """Return True if Pillow would decode this image in Python. Its pixels must not be loaded
    yet.
    """
    return image.format == "PPM" and image.tile[0].codec_name != "raw"


def load(image: ImageFile.ImageFile, data: memoryview) -> PIL.Image.Image:
    """Decode and return an image for which `is_slow` is true. Raises ValueError.

    data: the encoded file.
    """
    tile = image.tile[0]
    width, height = image.size
    bands = len(image.getbands())
    count = width * height * bands
    if image.mode == "1":  # bits, where 1 is black
        bits = _read_bits(data[tile.offset :], count)
        return PIL.Image.fromarray((1 - bits).reshape(height, width) * np.uint8(255))
    assert isinstance(tile.args, tuple)
    largest = int(tile.args[-1])
    top, kind = (65535, np.int32) if image.mode == "I" else (255, np.uint8)
    if tile.codec_name == "ppm_plain":
        scale = np.rint(np.arange(largest + 1) / largest * top).astype(kind)
        values = _read_numbers(data[tile.offset :], count, scale)
    else:
        stored = np.frombuffer(data, ">u2" if largest > 255 else "u1", count, tile.offset)
        every = np.arange(1 << 8 * stored.itemsize)
        scale = np.minimum(np.rint(every / largest * top), top).astype(kind)
        values = scale[stored]
    return PIL.Image.fromarray(values.reshape(height, width, *(bands,) * (bands > 1)))


def _read_bits(text: memoryview, count: int) -> npt.NDArray[np.uint8]:
    """Parse the digits 0 and 1 in `text`, with or without spaces between them. Raises
    ValueError.
    """
    digits = COMMENT.sub(b"", bytes(text)).translate(None, SPACES)
    bits = np.frombuffer(digits, np.uint8, count) - ord("0")
    if bits.max(initial=0) > 1:
        raise ValueError("its pixels must be 0 or 1")
    return bits


def _read_numbers(
    text: memoryview, count: int, scale: npt.NDArray[np.generic]
) -> npt.NDArray[np.generic]:
    """Return the values in `scale` at the numbers in `text`, which whitespace separates.

    Raises ValueError.
    """
    numbers = COMMENT.sub(b"", bytes(text))
    values = np.empty(count, scale.dtype)
    done = at = 0
    while done < count and at < len(numbers):
        rest = REST_OF_WORD.match(numbers, at + PART)
        end = rest.end() if rest else len(numbers)
        words = numbers[at:end].split(None, count - done)[: count - done]
        found = np.fromstring(b" ".join(words), np.int64, sep=" ")
        if len(found) and not 0 <= found.min() <= found.max() < len(scale):
            raise ValueError(f"its values must be from 0 to {len(scale) - 1}")
        values[done : done + len(found)] = scale[found]
        done, at = done + len(found), end
    if done < count:
        raise ValueError(f"it is truncated: it has {done} of {count} values")
    return values
