"""Questions about the order of events in a clip: the number in a frame or a second, and the first
colour. Works with any model that supports video.

Clips are sent as frames, two per second, so that results do not depend on a video decoder. An
answer is wrong if frames were reordered, dropped or taken from another clip.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from saccade_bench.drawn.draw import COLOURS, DEFAULT_FONT, SHAPES, Scene, draw_shapes_scene
from saccade_bench.drawn.tasks import HARDEST, Draw, number_scene
from saccade_bench.eval.contract import EvalMessage, Item
from saccade_bench.eval.ocr import says
from saccade_bench.eval.sampling import data_url
from saccade_bench.eval.shapes import named, png

KINDS = ("frame k", "second k", "first colour")
SIZE = (224, 160)
FPS = 2
LONGEST = 4
"""Maximum length of a clip in seconds."""


def items(count: int, seed: int) -> list[Item]:
    """Return `count` questions that cycle through the kinds."""
    return [_item(KINDS[number % len(KINDS)], seed + number) for number in range(count)]


def _item(kind: str, seed: int) -> Item:
    rng = random.Random(f"video/{kind}/{seed}")
    if kind == "first colour":
        frames, question, expected = _colours(rng)
    else:
        frames, question, expected = _numbers(rng, 1 if kind == "frame k" else FPS)
    return Item(
        id=f"video-{kind}-{seed}",
        group=kind,
        expected=expected,
        messages=lambda: [clip_message(frames, question)],
        score=lambda text: _is_right(kind, expected, text),
    )


def _numbers(rng: random.Random, held: int) -> tuple[list[Scene], str, str]:
    """Draw a different number for every `held` frames. `held` is 1, or FPS for one per second."""
    draw, seconds = Draw(rng, HARDEST, (DEFAULT_FONT,)), rng.randint(2, LONGEST)
    scenes: list[Scene] = []
    while len(scenes) < seconds * FPS // held:
        scene = number_scene(draw, SIZE)
        if _shown(scene) not in map(_shown, scenes):
            scenes.append(scene)
    asked = rng.randrange(len(scenes))
    unit = "frame" if held == 1 else "second"
    frames = [scene for scene in scenes for _ in range(held)]
    return frames, f"What number is in {unit} {asked + 1}?", _shown(scenes[asked])


def _colours(rng: random.Random) -> tuple[list[Scene], str, str]:
    """Draw a shape whose kind and colour change every second."""
    colours = rng.sample(list(COLOURS), rng.randint(2, LONGEST))
    scenes = [draw_shapes_scene(rng, [(colour, rng.choice(SHAPES))], SIZE) for colour in colours]
    frames = [scene for scene in scenes for _ in range(FPS)]
    return frames, "Which colour came first?", colours[0]


def _shown(scene: Scene) -> str:
    assert scene.text is not None, "scenes of numbers show text"
    return scene.text.text


def clip_message(frames: Sequence[Scene], question: str) -> EvalMessage:
    """Return a user message with a clip as frames, and a question."""
    video = {"type": "video", "video": [data_url(png(frame)) for frame in frames], "fps": FPS}
    return {"role": "user", "content": [video, {"type": "text", "text": question}]}


def _is_right(kind: str, expected: str, text: str) -> float:
    if kind == "first colour":
        return float(list(named(text, tuple(COLOURS)))[:1] == [expected])
    return says(text, expected)
