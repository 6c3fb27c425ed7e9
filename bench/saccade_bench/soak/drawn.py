"""Media generated from a seed: images, clips, PDFs and texts, small enough to send thousands."""

from __future__ import annotations

import io
import random
from functools import lru_cache
from typing import Any

import numpy as np
import PIL.Image

from saccade_bench.eval.ocr import QUESTIONS, draw_reading
from saccade_bench.fixtures.pdf import Sheet, pdf
from saccade_bench.image_files import data_url, save
from saccade_bench.load.clips import DrawnClip, encode_clip
from saccade_bench.load.images import DrawnImage
from saccade_bench.load.words import WORDS

QUESTION = QUESTIONS["number"]
FORMATS = ("PNG", "JPEG", "WEBP")


def text(seed: int, longest: int = 40) -> str:
    """Return random words."""
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))


@lru_cache(512)
def image(seed: int, size: tuple[int, int] | None = None) -> bytes:
    """Return an image file that shows a number, which the demo model can read."""
    drawn = draw_reading(seed, "number", size).encoded
    kind = FORMATS[seed % len(FORMATS)]
    if kind == "PNG":
        return drawn
    return save(PIL.Image.open(io.BytesIO(drawn)).convert("RGB"), kind)


def image_url(seed: int, size: tuple[int, int] | None = None) -> str:
    """Return `image` as a data URL."""
    return data_url(image(seed, size))


@lru_cache(64)
def frames(seed: int) -> tuple[str, ...]:
    """Return two, four or six frames of one size as data URLs."""
    return tuple(image_url(3 * (seed + step), (96, 64)) for step in range(2 + seed % 3 * 2))


@lru_cache(64)
def clip(seed: int) -> str:
    """Return an mp4 of two seconds as a data URL."""
    shown = tuple(DrawnImage("moving", 96, 64, seed, step=step) for step in range(4))
    return data_url(encode_clip(DrawnClip(shown)), "video/mp4")


@lru_cache(64)
def document(seed: int) -> bytes:
    """Return a PDF of one to three pages with a line and an image each."""
    sheets = []
    for page in range(1 + seed % 3):
        pixels = np.asarray(PIL.Image.open(io.BytesIO(image(seed + page))).convert("RGB"))
        sheets.append(Sheet([text(seed + page, 6)], pixels, (300.0, 220.0)))
    return pdf(sheets)


def part(url: str, **fields: Any) -> dict[str, Any]:
    """Return an image as a content part of chat completions."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def about(*parts: dict[str, Any], question: str = QUESTION) -> list[dict[str, Any]]:
    """Return media and a question as the content of a message."""
    return [*parts, {"type": "text", "text": question}]
