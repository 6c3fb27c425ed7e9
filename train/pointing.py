"""Positions to look at for each word of an answer: the shapes or characters in the images that it
names.

These positions are derived from a turn and its scenes. During training, they supervise one
attention head. They are not used for inference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from saccade_bench.drawn.draw import DrawnShape, Scene
from saccade_bench.drawn.tasks import TWO_HOPS, Exchange, is_number


@dataclass(frozen=True)
class Pointer:
    """The word at `start` of the answer is about a character or shape in image `picture` (from 0).

    `rank` is the position of the character in its line, or of the shape from the left, from 1. 0
    means all of them.
    """

    start: int
    picture: int
    rank: int


def pointers(turn: Exchange, seen: Sequence[Scene]) -> list[Pointer]:
    """Return the pointers of an answer. `seen` are all images of the chat so far, including the
    images of this turn.
    """
    if turn.kind in ("talk", TWO_HOPS):
        return []
    if turn.kind == "which":
        return _point_to_named(turn.answer, seen)
    named = re.search(r"picture (\d)", turn.question)
    picture = int(named[1]) - 1 if named else len(seen) - 1
    scene = seen[picture]
    if scene.text is not None:
        start = turn.answer.rindex(scene.text.text.lower())
        return [Pointer(start + i, picture, i + 1) for i in range(len(scene.text.text))]
    if turn.kind == "colour":
        shape = next(shape for shape in scene.shapes if shape.kind == turn.answer.split()[1])
        return [Pointer(turn.answer.rindex(shape.colour), picture, _rank(shape, scene))]
    if turn.kind == "shape":
        shape = next(shape for shape in scene.shapes if shape.colour == turn.answer.split()[1])
        return [Pointer(turn.answer.rindex(shape.kind), picture, _rank(shape, scene))]
    if turn.kind == "count" or len(scene.shapes) > 3:
        digits = list(re.finditer(r"\d", turn.answer))
        return [Pointer(digits[-1].start(), picture, 0)]
    return _point_along(turn.answer, scene, picture)


def _point_along(answer: str, scene: Scene, picture: int) -> list[Pointer]:
    """Point to the colour and kind of every shape, in the order in which the answer names them."""
    found, cursor = [], answer.find(" shows ") + 1
    lower = answer.lower()
    for shape in scene.shapes:
        for word in (shape.colour, shape.kind):
            start = lower.index(word, cursor)
            found.append(Pointer(start, picture, _rank(shape, scene)))
            cursor = start + len(word)
    return found


def _point_to_named(answer: str, seen: Sequence[Scene]) -> list[Pointer]:
    """Point from the image number in "The red circle is in picture 2." to the circle."""
    start = len(answer) - 2
    picture = int(answer[start]) - 1
    scene = seen[picture]
    name = answer.removeprefix("The ").split(" is in ")[0]
    if scene.text is not None:
        assert name == ("number" if is_number(scene) else "word")
        return [Pointer(start, picture, 0)]
    shape = next(shape for shape in scene.shapes if f"{shape.colour} {shape.kind}" == name)
    return [Pointer(start, picture, _rank(shape, scene))]


def _rank(shape: DrawnShape, scene: Scene) -> int:
    return 1 + sorted(scene.shapes, key=lambda one: one.x).index(shape)
