"""Reading drawn words and numbers: the eval `ocr`, and the pictures of the benchmark's data set of that name.

Owns which texts are drawn and when an answer is right: the text stands in it as a word of its own, whatever is said around it. The
drawing is the demo model's; Pillow's own font alone is used, so that pictures are the same everywhere.
"""

from __future__ import annotations

import io
import random
import re
from dataclasses import dataclass
from typing import Literal

from saccade.demo.draw import DEFAULT_FONT, draw_size, draw_text_scene, render
from saccade.demo.words import KNOWN_WORDS
from saccade.tools.eval.contract import Item
from saccade.tools.eval.sampling import user_message

Kind = Literal["number", "word"]
QUESTIONS: dict[Kind, str] = {"number": "What number is this?", "word": "What word is this?"}


@dataclass(frozen=True, slots=True)
class Reading:
    """A PNG with one line of text, the question about it and the text."""

    encoded: bytes
    question: str
    expected: str


def draw_reading(seed: int, kind: Kind, size: tuple[int, int] | None = None) -> Reading:
    """A number of one to six digits or a known word; `size` in pixels, else each side between 96 and 320."""
    rng = random.Random(f"ocr/{kind}/{seed}")
    text = "".join(rng.choices("0123456789", k=rng.randint(1, 6))) if kind == "number" else rng.choice(KNOWN_WORDS)
    buffer = io.BytesIO()
    render(draw_text_scene(rng, text, size or draw_size(rng), (DEFAULT_FONT,))).save(buffer, "PNG")
    return Reading(buffer.getvalue(), QUESTIONS[kind], text)


def says(text: str, expected: str) -> float:
    """1 if `expected` stands in the text as a word of its own (case and thousands separators aside), else 0."""
    bare = re.sub(r"(?<=\d)[, ](?=\d{3}\b)", "", text)
    return float(any(re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", form, re.IGNORECASE) for form in (text, bare)))


def items(count: int, seed: int) -> list[Item]:
    """`count` readings, numbers and words in turn."""
    return [_item(seed + number, ("number", "word")[number % 2]) for number in range(count)]


def _item(seed: int, kind: Kind) -> Item:
    reading = draw_reading(seed, kind)
    return Item(
        id=f"ocr-{kind}-{seed}",
        group=kind,
        expected=reading.expected,
        messages=lambda: [user_message([reading.encoded, reading.question])],
        score=lambda text: says(text, reading.expected),
    )
