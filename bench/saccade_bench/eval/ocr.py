"""Reading rendered words and numbers: the eval `ocr`, and the images of the benchmark's data set of
the same name.

An answer is correct if it contains the text as a separate word, with any other text around it.
Images are drawn as for the demo model, but only with Pillow's built-in font, so that they are the
same on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from saccade_bench.drawn.draw import DEFAULT_FONT, draw_size, render
from saccade_bench.drawn.tasks import HARDEST, SCENES, Draw
from saccade_bench.eval.contract import Item
from saccade_bench.eval.sampling import user_message
from saccade_bench.image_files import save
from saccade_bench.prove import client as prove_client

Kind = Literal["number", "word"]
QUESTIONS: dict[Kind, str] = {"number": "What number is this?", "word": "What word is this?"}


@dataclass(frozen=True, slots=True)
class OcrLine:
    """A PNG with one line of text, a question about it, and the text."""

    encoded: bytes
    question: str
    expected: str


def draw_reading(seed: int, kind: Kind, size: tuple[int, int] | None = None) -> OcrLine:
    """Draw a number of one to six digits, or a word from the demo model's vocabulary.

    `size` is (width, height) in pixels. By default, each side is between 96 and 320.
    """
    rng = random.Random(f"ocr/{kind}/{seed}")
    scene = SCENES[kind](Draw(rng, HARDEST, (DEFAULT_FONT,)), size or draw_size(rng))
    assert scene.text is not None, "scenes of this kind show text"
    return OcrLine(save(render(scene)), QUESTIONS[kind], scene.text.text.lower())


def says(text: str, expected: str) -> float:
    """Return 1 if the text contains `expected` as a separate word, or else 0."""
    return float(prove_client.says(text, expected))


def items(count: int, seed: int) -> list[Item]:
    """Return `count` items, alternating numbers and words."""
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
