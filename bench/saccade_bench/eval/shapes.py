"""Questions about drawn shapes: their colour, kind and count, and one among several images. Works
with the demo model and any other.

An answer is correct if it names the right colours, shapes and numbers, in any wording. Scenes and
questions are those that the demo model was not trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from saccade_bench.drawn.draw import COLOURS, DEFAULT_FONT, SHAPES, Scene, render
from saccade_bench.drawn.tasks import Exchange, held_out
from saccade_bench.eval.contract import Item
from saccade_bench.eval.ocr import says
from saccade_bench.eval.sampling import user_message
from saccade_bench.image_files import save

KINDS = ("describe", "shape", "colour", "count", "picture k", "which")
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six")


def items(count: int, seed: int) -> list[Item]:
    """Return `count` questions that cycle through the kinds."""
    return [_item(KINDS[number % len(KINDS)], seed + number) for number in range(count)]


def _item(kind: str, seed: int) -> Item:
    turn = held_out(kind, seed, (DEFAULT_FONT,)).turns[-1]
    return Item(
        id=f"shapes-{kind}-{seed}",
        group=kind,
        expected=turn.answer,
        messages=lambda: [user_message([*map(png, turn.scenes), turn.question])],
        score=lambda text: float(is_right(kind, turn, text)),
    )


def png(scene: Scene) -> bytes:
    return save(render(scene))


def is_right(kind: str, turn: Exchange, text: str) -> bool:
    """Return True if the text names the same things as the expected answer, and no others of their
    kind.
    """
    if kind == "shape":
        return set(named(text, SHAPES)) == set(named(turn.answer, SHAPES))
    if kind == "colour":
        return set(named(text, tuple(COLOURS))) == set(named(turn.answer, tuple(COLOURS)))
    if kind in ("count", "which"):
        return _numbers(text)[-1:] == _numbers(turn.answer)[-1:]
    scene = _described(kind, turn)
    if scene.text is not None:
        return bool(says(text, scene.text.text))
    return _things(text) == [(shape.colour, shape.kind) for shape in scene.shapes]


def _described(kind: str, turn: Exchange) -> Scene:
    """Return the scene that the question is about."""
    if kind == "describe":
        return turn.scenes[0]
    number = re.search(r"picture (\d)", turn.question)
    assert number, f"a question of kind {kind!r} names its picture: {turn.question}"
    return turn.scenes[int(number[1]) - 1]


def named(text: str, names: tuple[str, ...]) -> Iterator[str]:
    pattern = rf"\b({'|'.join(names)})(?:e?s)?\b"
    yield from (found.lower() for found in re.findall(pattern, text, re.IGNORECASE))


def _things(text: str) -> list[tuple[str, str]]:
    """Return the (colour, shape) pairs in the text, in order."""
    pattern = rf"\b({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})\b"
    return [
        (colour.lower(), shape.lower())
        for colour, shape in re.findall(pattern, text, re.IGNORECASE)
    ]


def _numbers(text: str) -> list[int]:
    """Return the numbers in the text, as digits or words, in order."""
    found = re.findall(rf"\b(\d+|{'|'.join(NUMBER_WORDS)})\b", text.lower())
    return [int(word) if word.isdigit() else NUMBER_WORDS.index(word) for word in found]
