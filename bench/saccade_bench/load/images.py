"""Images for benchmarks, generated from a seed.

They have equal pixels on every machine: random numbers come from PCG64's raw stream, the only part
of numpy's generators that is guaranteed to be stable, and pixels from integer arithmetic. Rendered
text and encoded files depend on the version of Pillow.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install
from saccade_bench.image_files import save
from saccade_bench.load.words import WORDS
from saccade_bench.options import Format, ImageContent

JPEG_QUALITY = 85

NAMED_SIZES = {
    "360p": (640, 360),
    "480p": (854, 480),
    "720p": (1280, 720),
    "1080p": (1920, 1080),
    "1440p": (2560, 1440),
    "4k": (3840, 2160),
}

# From scikit-image's wheel: file name -> first digits of its SHA-256, to detect changed files.
PHOTOGRAPHS = {
    "astronaut.png": "88431cd9653ccd53",
    "chelsea.png": "596aa1e7cb875eb7",
    "coffee.png": "cc02f8ca188b167c",
    "motorcycle_left.png": "db18e9c415761740",
}
CELL = 480  # px; about the size at which a photograph is used in a collage, to avoid upscaling


@dataclass(frozen=True, slots=True)
class DrawnImage:
    """Parameters of an image. Equal parameters generate equal pixels.

    If `step` > 0, it is the step-th screenshot of a desktop, or the step-th frame of a moving
    scene.
    """

    content: ImageContent
    width: int
    height: int
    seed: int
    format: Format = "jpeg"
    step: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Range of image sizes in pixels: the width in [low[0], high[0]] and the height in
    [low[1], high[1]] are drawn uniformly.
    """

    low: tuple[int, int]
    high: tuple[int, int]

    def draw(self, dice: Dice) -> tuple[int, int]:
        return dice.between(self.low[0], self.high[0]), dice.between(self.low[1], self.high[1])


class Dice:
    """Random numbers that are the same on every machine and with every version of numpy."""

    def __init__(self, *seed: int) -> None:
        self._raw = np.random.PCG64(np.random.SeedSequence(seed))

    def between(self, low: int, high: int) -> int:
        """Return an integer in [low, high]."""
        return low + int(self._raw.random_raw()) % (high - low + 1)

    def share(self) -> float:
        """Return a float in [0, 1)."""
        return (int(self._raw.random_raw()) >> 11) / (1 << 53)

    def bytes(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        words = self._raw.random_raw(-(-count // 8))
        return words.astype("<u8").view(np.uint8)[:count]


def parse_resolution(text: str, option: str = "--image-resolution") -> Sizes:
    """Parse `1120x700` (width x height), a name such as `1080p`, or `random:AxB-CxD`.

    Raises ConfigError with the option's name.
    """
    if size := _exact(text):
        return Sizes(size, size)
    match = re.fullmatch(r"random:(\d+)x(\d+)-(\d+)x(\d+)", text)
    if match:
        a, b, c, d = map(int, match.groups())
        if 0 < a <= c and 0 < b <= d:
            return Sizes((a, b), (c, d))
    raise ConfigError(
        f"{option} {text}: expected WIDTHxHEIGHT, random:AxB-CxD or one of {', '.join(NAMED_SIZES)}"
    )


def parse_size(text: str) -> tuple[int, int]:
    """Return the (width, height) of one of --resolutions, which may not be a range.

    Raises ConfigError.
    """
    if size := _exact(text):
        return size
    raise ConfigError(
        f"--resolutions {text}: expected WIDTHxHEIGHT or one of {', '.join(NAMED_SIZES)}"
    )


def _exact(text: str) -> tuple[int, int] | None:
    """Return the size of a name or of WIDTHxHEIGHT, or None if it is neither or empty."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    size = (int(match[1]), int(match[2])) if match else NAMED_SIZES.get(text)
    return size if size and all(size) else None


def encode(drawn: DrawnImage) -> bytes:
    """Return the image as an encoded file.

    Raises ConfigError if `photo` needs a package that is not installed.
    """
    how = {"compress_level": 6} if drawn.format == "png" else {"quality": JPEG_QUALITY}
    return save(draw(drawn), drawn.format.upper(), **how)


def draw(drawn: DrawnImage) -> Image.Image:
    """Return the image as RGB pixels."""
    dice = Dice(drawn.seed, drawn.width, drawn.height)
    size = drawn.width, drawn.height
    if drawn.content == "moving":
        return _draw_moving(dice, size, drawn.step)
    if drawn.step:
        return _draw_screen(dice, size, drawn.step)
    if drawn.content == "random":
        noise = dice.bytes(3 * size[0] * size[1]).reshape(size[1], size[0], 3)
        return Image.fromarray(np.ascontiguousarray(noise))
    if drawn.content == "photo":
        return _draw_photo(dice, size)
    if drawn.content == "document":
        return _draw_document(dice, size)
    return Image.new(
        "RGB", size, (dice.between(0, 255), dice.between(0, 255), dice.between(0, 255))
    )


def _draw_moving(dice: Dice, size: tuple[int, int], step: int) -> Image.Image:
    """Draw discs that move at different speeds, and the frame number."""
    ground, *colours = (tuple(map(int, dice.bytes(3))) for _ in range(5))
    image = Image.new("RGB", size, ground)
    canvas, radius = ImageDraw.Draw(image), max(2, min(size) // 8)
    for colour in colours:
        x, y = (
            (dice.between(0, side) + step * dice.between(1, 1 + side // 8)) % side for side in size
        )
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    unit = max(10, min(size) // 4)
    canvas.rectangle((0, 0, 4 * unit, unit + unit // 4), fill="white")
    canvas.text((unit // 4, 0), str(step), fill="black", font=font(unit))
    return image


# Photographs


@lru_cache(maxsize=1)
def photographs() -> tuple[Image.Image, ...]:
    """Return the photographs from which `photo` images are composed.

    Raises ConfigError if scikit-image is missing or ships different files.
    """
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "--image-content photo draws on scikit-image's photographs: "
            + how_to_install("./bench")
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    found = []
    for name, digest in PHOTOGRAPHS.items():
        path = folder / name
        if not path.is_file() or not hashlib.sha256(path.read_bytes()).hexdigest().startswith(
            digest
        ):
            raise ConfigError(
                f"{name} of the installed scikit-image is missing or another one: `photo` "
                "pictures would not be comparable"
            )
        with Image.open(path) as image:
            found.append(image.convert("RGB"))
    return tuple(found)


def _draw_photo(dice: Dice, size: tuple[int, int]) -> Image.Image:
    """Draw a collage of cropped, mirrored and re-lit photographs with sensor noise."""
    columns, rows = (max(1, round(side / CELL)) for side in size)
    image = Image.new("RGB", size)
    for row in range(rows):
        for column in range(columns):
            left, right = (size[0] * edge // columns for edge in (column, column + 1))
            top, bottom = (size[1] * edge // rows for edge in (row, row + 1))
            image.paste(_crop(dice, (right - left, bottom - top)), (left, top))
    pixels = np.asarray(image, dtype=np.int16)
    # The difference of two random 3-bit values: roughly normal, with a deviation of 1.6 levels.
    faces = dice.bytes(pixels.size).reshape(pixels.shape)
    grain = (faces & 7).astype(np.int16) - (faces >> 5)
    return Image.fromarray(np.clip(pixels + grain // 2, 0, 255).astype(np.uint8))


def _crop(dice: Dice, size: tuple[int, int]) -> Image.Image:
    sources = photographs()
    source = sources[dice.between(0, len(sources) - 1)]
    scale = min(source.width / size[0], source.height / size[1]) * dice.between(60, 100) / 100
    width, height = max(1, int(size[0] * scale)), max(1, int(size[1] * scale))
    left, top = dice.between(0, source.width - width), dice.between(0, source.height - height)
    crop = source.crop((left, top, left + width, top + height)).resize(
        size, Image.Resampling.BICUBIC
    )
    if dice.between(0, 1):
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    gains = [dice.between(88, 112) for _ in range(3)]
    table = [min(255, level * gain // 100) for gain in gains for level in range(256)]
    return crop.point(table)


# Text


@lru_cache(maxsize=64)
def font(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's built-in font with the basic layout engine, because the other one depends on
    a system library.
    """
    found = ImageFont.load_default(size)
    assert isinstance(found, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return found.font_variant(layout_engine=ImageFont.Layout.BASIC)


def _lines(dice: Dice, face: ImageFont.FreeTypeFont, width: int) -> Iterator[str]:
    """Yield an endless sequence of lines of words and numbers, each at most `width` pixels wide."""
    line = ""
    while True:
        word = (
            WORDS[dice.between(0, len(WORDS) - 1)]
            if dice.between(0, 7)
            else str(dice.between(10, 99999))
        )
        longer = f"{line} {word}" if line else word.capitalize()
        if line and face.getlength(longer) > width:
            yield line
            line = word
        else:
            line = longer


def _draw_document(dice: Dice, size: tuple[int, int]) -> Image.Image:
    """Draw a page with a heading, paragraphs and tables of numbers."""
    image = Image.new("RGB", size, (252, 252, 250))
    canvas = ImageDraw.Draw(image)
    unit = max(10, min(size) // 45)
    margin, ink = 2 * unit, (25, 25, 30)
    body, heading = font(unit), font(2 * unit)
    inner = size[0] - 2 * margin
    canvas.text((margin, margin), next(_lines(dice, heading, inner)), fill=ink, font=heading)
    y, text = margin + 4 * unit, _lines(dice, body, inner)
    while y + unit < size[1] - margin:
        if dice.between(0, 3):
            for _ in range(dice.between(3, 9)):
                canvas.text((margin, y), next(text), fill=ink, font=body)
                y += unit * 3 // 2
        else:
            y = _draw_table(canvas, dice, (margin, y, inner), unit)
        y += unit
    canvas.rectangle((0, size[1] - margin, *size), fill=(252, 252, 250))
    return image


def _draw_table(
    canvas: ImageDraw.ImageDraw, dice: Dice, place: tuple[int, int, int], unit: int
) -> int:
    """Draw a table of numbers at `place` (left, top, width). Return its lower edge."""
    left, top, width = place
    columns, rows = dice.between(3, 6), dice.between(3, 6)
    for row in range(rows):
        y = top + row * 2 * unit
        canvas.line((left, y, left + width, y), fill=(150, 150, 155))
        for column in range(columns):
            value = f"{dice.between(0, 99999) / 100:.2f}"
            canvas.text(
                (left + width * column // columns, y + unit // 2),
                value,
                fill=(25, 25, 30),
                font=font(unit),
            )
    bottom = top + rows * 2 * unit
    canvas.line((left, bottom, left + width, bottom), fill=(150, 150, 155))
    return bottom


def _draw_screen(dice: Dice, size: tuple[int, int], step: int) -> Image.Image:
    """Draw screenshot number `step` of a desktop: a window with a list in which `step` rows are
    checked, and the pointer.
    """
    image = Image.new("RGB", size, (58, 74, 104))
    canvas = ImageDraw.Draw(image)
    unit = max(10, min(size) // 40)
    left, top, right, bottom = 2 * unit, 2 * unit, size[0] - 2 * unit, size[1] - 2 * unit
    canvas.rectangle((left, top, right, bottom), fill=(248, 248, 250))
    canvas.rectangle((left, top, right, top + 2 * unit), fill=(222, 225, 232))
    face = font(unit)
    text = _lines(dice, face, max(unit, right - left - 8 * unit))
    canvas.text((left + unit, top + unit // 2), next(text), fill=(30, 30, 35), font=face)
    rows = max(1, (bottom - top - 3 * unit) // (2 * unit))
    for row in range(rows):
        y = top + 3 * unit + row * 2 * unit
        done = row < step % (rows + 1)
        canvas.rectangle(
            (left + unit, y, left + 2 * unit, y + unit),
            outline=(90, 90, 95),
            fill=(52, 140, 90) if done else None,
        )
        canvas.text(
            (left + 3 * unit, y),
            next(text),
            fill=(130, 130, 135) if done else (30, 30, 35),
            font=face,
        )
    x, y = left + unit + step * 37 % max(1, right - left), top + 3 * unit + step % rows * 2 * unit
    canvas.polygon([(x, y), (x, y + unit), (x + 2 * unit // 3, y + 2 * unit // 3)], fill=(0, 0, 0))
    return image
