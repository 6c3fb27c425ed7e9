"""Pairs of images that show different numbers, but agree in data that a faulty cache key might be
made of.

Such keys could be made of the first and last bytes of a file, of the pixel data without its
palette, of sampled pixels, or of the size.
"""

from __future__ import annotations

import hashlib
import io
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

WIDTH, HEIGHT = 256, 128
"""Size of most images. Both are multiples of vision encoders' input sizes, so that servers do not
resize the images.
"""
PAPER, INK = (236, 244, 238), (20, 20, 24)
SCREEN = 512
"""Width and height of a screenshot in pixels. It covers several tiles, if the model uses tiles."""
FONT = 64
STRIDE = 16
"""`sampled` pairs have the same value in every 16th byte."""
BMP_HEADER = 54
SHARED_BYTES = 16_384
"""Number of equal bytes at the start and at the end of `middles` pairs."""

SHORT_KEYS: Mapping[str, Callable[[bytes], bytes | int]] = {
    "CRC-32": zlib.crc32,
    "MD5": lambda data: hashlib.md5(data, usedforsecurity=False).digest()[:4],
    "SHA-256": lambda data: hashlib.sha256(data).digest()[:4],
}
"""Keys of 32 bits. For other hashes, send enough images in the case "many"."""

Mask = np.ndarray[tuple[int, int], np.dtype[np.bool_]]
Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class NumberImage:
    """An encoded image. `number` is the number that it shows, or "" if it is not readable."""

    encoded: bytes
    number: str
    kind: str = "image/png"


def numbers(seed: int, count: int, digits: int = 5) -> list[str]:
    """Return random numbers. Any two of them differ in at least two digits, so that misreading one
    digit never yields another one. The last digit is a checksum of the others.
    """
    rng = random.Random(f"prove/{seed}")
    heads = rng.sample(range(10 ** (digits - 2), 10 ** (digits - 1)), count)
    return [f"{head}{sum(map(int, str(head))) % 10}" for head in heads]


def mask(number: str, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Mask:
    """Return the mask of a number's text, bool [H, W]."""
    width, height = size
    drawn = Image.new("L", size, 255)
    place = (width - len(number) * 0.58 * FONT) / 2, height / 2 + 22
    font = ImageFont.load_default(FONT)
    ImageDraw.Draw(drawn).text(place, number, fill=0, font=font, anchor="ls")
    found: Mask = np.asarray(drawn) < 128
    return found


def save(image: Image.Image | Pixels, format: str = "PNG", **options: Any) -> bytes:
    """Encode an image or its pixels (uint8 [H, W, 3]) as a file."""
    file = io.BytesIO()
    made = image if isinstance(image, Image.Image) else Image.fromarray(image)
    made.save(file, format, **options)
    return file.getvalue()


def pixels(ink: Mask) -> Pixels:
    """Return a mask's image, uint8 [H, W, 3]."""
    found: Pixels = np.where(ink[..., None], INK, PAPER).astype(np.uint8)
    return found


def beside(left: str, right: str) -> NumberImage:
    """Return an image with two numbers, one in each half."""
    return NumberImage(save(pixels(np.hstack([mask(left), mask(right)]))), "")


def pages(numbers: Sequence[tuple[str, str]]) -> bytes:
    """Return a PDF with two numbers on each page, and a page size of one point per pixel."""
    first, *rest = (
        Image.fromarray(pixels(np.hstack([mask(left), mask(right)]))) for left, right in numbers
    )
    return save(first, "PDF", save_all=True, append_images=rest, resolution=72.0, quality=95)


def bmp(array: Pixels) -> bytes:
    """Return an uncompressed BMP, which stores rows from bottom to top."""
    return save(array, "BMP")


def plain(number: str) -> NumberImage:
    return NumberImage(save(pixels(mask(number))), number)


def again(shown: NumberImage, nonce: str) -> NumberImage:
    """Return the same pixels in a file with different bytes."""
    with Image.open(io.BytesIO(shown.encoded)) as image:
        note = PngImagePlugin.PngInfo()
        note.add_text("nonce", nonce)
        return NumberImage(save(image.convert("RGB"), pnginfo=note), shown.number)


def palettes(one: str, other: str) -> tuple[NumberImage, NumberImage]:
    """Return two files with the same pixel data, whose palettes show different numbers."""
    first, second = mask(one), mask(other)
    indices = (first.astype(np.uint8) + 2 * second.astype(np.uint8)).astype(np.uint8)

    def made(number: str, seen: Sequence[int]) -> NumberImage:
        image = Image.fromarray(indices, "P")
        colours = [INK if index in seen else PAPER for index in range(4)]
        image.putpalette([value for colour in colours for value in colour])
        return NumberImage(save(image), number)

    return made(one, (1, 3)), made(other, (2, 3))


def alphas(one: str, other: str) -> tuple[NumberImage, NumberImage]:
    """Return two files with the same black pixels, whose alpha channels show different numbers on
    any light background.
    """

    def made(number: str) -> NumberImage:
        opaque = np.where(mask(number), np.uint8(255), np.uint8(0))
        black = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        return NumberImage(save(Image.fromarray(np.dstack([black, opaque]), "RGBA")), number)

    return made(one), made(other)


def turns(number: str) -> tuple[NumberImage, NumberImage]:
    """Return the same pixels upside down, which is unreadable, and rotated upright by EXIF."""
    upside_down = Image.fromarray(pixels(mask(number))[::-1, ::-1].copy())

    def made(orientation: int, seen: str) -> NumberImage:
        exif = Image.Exif()
        exif[0x0112] = orientation
        buffer = io.BytesIO()
        upside_down.save(buffer, "JPEG", quality=95, exif=exif)
        return NumberImage(buffer.getvalue(), seen, "image/jpeg")

    return made(1, ""), made(3, number)


def middles(one: str, other: str) -> tuple[NumberImage, NumberImage]:
    """Return two files with the same `SHARED_BYTES` at the start and at the end."""
    note = random.Random("prove/note").randbytes(SHARED_BYTES)

    def made(number: str) -> NumberImage:
        whole = plain(number).encoded
        header, rest = whole[:33], whole[33:]  # the signature and IHDR, and all later chunks
        trailer = rest[-12:]  # IEND
        return NumberImage(
            header + _chunk(b"prVe", note) + rest[:-12] + _chunk(b"prVe", note) + trailer, number
        )

    return made(one), made(other)


def sampled(one: str, other: str) -> tuple[NumberImage, NumberImage]:
    """Return two BMPs with the same values in every `STRIDE`-th byte of the file and the pixels."""

    def made(number: str) -> NumberImage:
        rows = pixels(mask(number))[::-1].copy()  # from bottom to top, as in the file
        rows.reshape(-1)[::STRIDE] = PAPER[0]
        stored = rows[..., ::-1].copy()  # as BGR
        stored.reshape(-1)[-BMP_HEADER % STRIDE :: STRIDE] = PAPER[0]
        rows = stored[..., ::-1]
        return NumberImage(bmp(rows[::-1].copy()), number, "image/bmp")

    return made(one), made(other)


def colliding(key: str, one: str, other: str) -> tuple[NumberImage, NumberImage]:
    """Return two files with the same short key, found among files with other bytes after the end,
    which decoders ignore.

    Among 2 x 2^17 files, two of different images share 32 bits with 98 % probability. The search
    goes on until it finds them.
    """
    hashed, first, second = SHORT_KEYS[key], plain(one).encoded, plain(other).encoded
    known: dict[bytes | int, bytes] = {}
    rng = random.Random(f"prove/{key}/{one}/{other}")
    while True:
        # Counted tails would never do for a CRC, which is linear.
        tail = rng.randbytes(8)
        known[hashed(first + tail)] = tail
        if (found := known.get(hashed(second + tail))) is not None:
            return NumberImage(first + found, one), NumberImage(second + tail, other)


def shapes(number: str) -> tuple[NumberImage, NumberImage]:
    """Return the same pixel data as a readable image, and as one of half the width."""
    array = pixels(mask(number))
    narrow = array.reshape(2 * HEIGHT, WIDTH // 2, 3)
    return plain(number), NumberImage(save(narrow), "")


def one_pixel(number: str) -> tuple[NumberImage, NumberImage]:
    """Return two images that differ in one pixel in a corner, which no model can distinguish."""
    array = pixels(mask(number))
    changed = array.copy()
    changed[4:5, 4:5] = INK
    return NumberImage(save(array), number), NumberImage(save(changed), number)


def last_byte(number: str) -> tuple[NumberImage, NumberImage]:
    """Return two BMPs that differ in their last byte, a channel of the top right pixel."""
    first = bmp(pixels(mask(number)))
    return NumberImage(first, number, "image/bmp"), NumberImage(
        first[:-1] + b"\x00", number, "image/bmp"
    )


def screen(number: str) -> NumberImage:
    """Return a screenshot that only depends on the number in its bottom right corner."""
    array = np.full((SCREEN, SCREEN, 3), PAPER, np.uint8)
    noise = random.Random("prove/screen")
    for top in range(0, SCREEN, SCREEN // 8):
        left = noise.randrange(SCREEN // 2)
        array[top : top + 3, left : left + SCREEN // 4] = [noise.randrange(256) for _ in "rgb"]
    top, left = SCREEN - HEIGHT, SCREEN - WIDTH
    array[top:, left:] = pixels(mask(number))
    return NumberImage(save(array), number)


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file that decoders ignore."""
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
