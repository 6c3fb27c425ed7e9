"""Answers written as JSON objects, as a grammar forces them: `{"answer": "The number is 407."}`.

A model that was only trained on sentences ends them with the end token. In a JSON string the
grammar excludes that token, and the model would continue up to `max_tokens`. These answers teach it
to close strings and arrays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from saccade_bench.drawn.draw import DrawnShape, Scene
from saccade_bench.drawn.tasks import LETTERS, Exchange, thing

SENTENCE_KEYS = (
    "answer", "text", "description", "caption", "summary", "result", "response", "content",
    "message", "title", "output", "value", "name", "reason", "explanation",
)  # fmt: skip
TEXT_KEYS = ("text", "number", "word", "digits", "value", "transcription")
COLOUR_KEYS = ("colour", "color")
SHAPE_KEYS = ("shape", "kind", "type", "form")
OBJECT_KEYS = ("object", "item", "thing", "figure")
LIST_KEYS = ("objects", "items", "shapes", "things", "labels", "tags", "contents")
COUNT_KEYS = ("count", "number", "total", "amount", "quantity", "number_of_shapes", "n")
MARKS = '{}[]"_'
"""Characters of JSON that do not occur in sentences or in the chat template."""

Value = str | int | list[str]
Maker = Callable[[], tuple[str, Value]]
"""Draws a field."""


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer. Only learned parts have a loss."""

    text: str
    learned: bool


def write_object(rng: random.Random, turn: Exchange, scene: Scene | None) -> list[AnswerPart]:
    """Return the answer to a turn as a JSON object of one to three fields. scene: the last image.

    Joined, the parts are a document that `json.loads` reads, or a call in Hermes' format. Values
    are learned up to the character that ends them. A grammar forces the rest.
    """
    fields = _draw_fields(rng, turn, scene)
    parts = [AnswerPart("{", False)]
    for position, (key, value) in enumerate(fields.items()):
        last = position == len(fields) - 1
        parts += [AnswerPart(f'"{key}": ', False), *_write_value(value)]
        parts += [
            AnswerPart("}" if last else ",", isinstance(value, int)),
            AnswerPart("" if last else " ", False),
        ]
    if rng.random() < 0.25:
        name = "".join(rng.choices(LETTERS, k=rng.randint(3, 12)))
        start = f'<tool_call>\n{{"name": "{name}", "arguments": '
        return [AnswerPart(start, False), *parts, AnswerPart("}\n</tool_call>", False)]
    return parts


def _write_value(value: Value) -> list[AnswerPart]:
    if isinstance(value, int):
        return [AnswerPart(str(value), True)]
    if isinstance(value, str):
        return [AnswerPart('"', False), AnswerPart(f'{value}"', True)]
    parts = [AnswerPart("[", False)]
    for position, item in enumerate(value):
        last = position == len(value) - 1
        parts += [
            *_write_value(item),
            AnswerPart("]" if last else ",", True),
            AnswerPart("" if last else " ", False),
        ]
    return parts


def _draw_fields(rng: random.Random, turn: Exchange, scene: Scene | None) -> dict[str, Value]:
    makers: list[Maker] = [
        lambda: (rng.choice(SENTENCE_KEYS), turn.answer),
        lambda: ("".join(rng.choices(LETTERS + "_", k=rng.randint(1, 10))), turn.answer),
    ]
    makers += _makers_of_values(rng, turn, scene)
    fields: dict[str, Value] = {}
    for make in rng.choices(makers, k=rng.choice([1, 1, 1, 2, 3])):
        key, value = make()
        fields.setdefault(key, value)
    return fields


def _makers_of_values(rng: random.Random, turn: Exchange, scene: Scene | None) -> list[Maker]:
    """Return functions that draw a field whose value is less than the sentence."""
    last = turn.answer.rstrip(".").rsplit(" ", 1)[-1]
    match turn.kind:
        case "number" | "word" | "text":
            makers: list[Maker] = [lambda: (rng.choice(TEXT_KEYS), last)] * 3
            integer = last.isdigit() and not last.startswith("0")
            return [*makers, lambda: ("number", int(last))] if integer else makers
        case "count":
            count = int("".join(filter(str.isdigit, turn.answer)))
            return [lambda: (rng.choice(COUNT_KEYS), count)] * 3
        case "colour":
            return [lambda: (rng.choice(COLOUR_KEYS), last)] * 3
        case "shape":
            return [lambda: (rng.choice(SHAPE_KEYS), last)] * 3
        case "describe" if scene is not None:
            return _makers_of_shapes(rng, scene.shapes)
    return []


def _makers_of_shapes(rng: random.Random, shapes: Sequence[DrawnShape]) -> list[Maker]:
    if len(shapes) == 1:
        (shape,) = shapes
        return [
            lambda: (rng.choice(COLOUR_KEYS), shape.colour),
            lambda: (rng.choice(SHAPE_KEYS), shape.kind),
            lambda: (rng.choice(OBJECT_KEYS), f"{shape.colour} {shape.kind}"),
        ]
    if 2 <= len(shapes) <= 3:
        names = [thing(shape.colour, shape.kind) for shape in shapes]
        return [lambda: (rng.choice(LIST_KEYS), names)] * 2
    return []
