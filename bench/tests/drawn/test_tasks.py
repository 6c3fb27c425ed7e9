"""The drawn questions: every expected answer follows from the scene, and follow-ups are
unambiguous.
"""

import random
import re
from collections import Counter

import pytest

from saccade_bench.drawn.draw import DEFAULT_FONT, Scene
from saccade_bench.drawn.tasks import (
    EASIEST,
    HARDEST,
    LETTERS,
    SKILLS,
    SMALL_TALK,
    Draw,
    Exchange,
    conversation,
    describe,
    held_out,
    is_number,
    plural,
)
from saccade_bench.drawn.words import KNOWN_WORDS
from train.tokenizer import vocabulary


def answer_from_scenes(turn: Exchange, seen: list[Scene]) -> str:
    """Derive a turn's answer independently, from only the question's words and the scenes."""
    named = re.search(r"picture (\d)", turn.question)
    scene = seen[int(named[1]) - 1] if named else seen[-1]
    text = scene.text.text.lower() if scene.text else ""
    phrase = describe(scene)
    if turn.kind == "number":
        assert is_number(scene)
        return f"The number is {text}."
    if turn.kind == "word":
        assert not is_number(scene)
        return f"The word is {text}."
    if turn.kind == "text":
        return f"It says {text}."
    if turn.kind == "describe":
        return f"{phrase[0].upper()}{phrase[1:]}."
    if turn.kind == "picture k":
        assert named
        return f"Picture {named[1]} shows {phrase}."
    if turn.kind == "count":
        kinds = [
            kind
            for kind in {shape.kind for shape in scene.shapes}
            if f" {plural(kind)}" in turn.question
        ]
        count = (
            sum(shape.kind == kinds[0] for shape in scene.shapes) if kinds else len(scene.shapes)
        )
        kind = kinds[0] if kinds else "shape"
        return f"There is 1 {kind}." if count == 1 else f"There are {count} {plural(kind)}."
    if turn.kind == "colour":
        matching = [shape for shape in scene.shapes if f" {shape.kind}" in turn.question]
        assert len(matching) == 1
        return f"The {matching[0].kind} is {matching[0].colour}."
    if turn.kind == "shape":
        matching = [shape for shape in scene.shapes if f" {shape.colour}" in turn.question]
        assert len(matching) == 1
        return f"The {matching[0].colour} shape is a {matching[0].kind}."
    assert turn.kind == "which"
    wanted = re.search(r"the ([a-z ]+)\?$", turn.question)
    assert wanted
    showing = [k for k, scene in enumerate(seen, 1) if shows(scene, wanted[1])]
    assert len(showing) == 1
    return f"The {wanted[1]} is in picture {showing[0]}."


def shows(scene: Scene, name: str) -> bool:
    if name in ("number", "word"):
        return scene.text is not None and is_number(scene) == (name == "number")
    return any(f"{shape.colour} {shape.kind}" == name for shape in scene.shapes)


@pytest.mark.parametrize("skill", SKILLS)
def test_every_expected_answer_follows_from_the_scenes(skill: str) -> None:
    for seed in range(150):
        seen: list[Scene] = []
        for turn in held_out(skill, seed, [DEFAULT_FONT]).turns:
            seen += turn.scenes
            assert turn.answer == answer_from_scenes(turn, seen), (seed, turn.question)


@pytest.mark.parametrize("level", [EASIEST, HARDEST], ids=["easiest", "hardest"])
def test_training_conversations_are_right_at_every_level(level: object) -> None:
    rng = random.Random(7)
    draw = Draw(rng, EASIEST if level is EASIEST else HARDEST, (DEFAULT_FONT,))
    for _ in range(150):
        seen: list[Scene] = []
        for turn in conversation(draw).turns:
            seen += turn.scenes
            assert turn.answer == answer_from_scenes(turn, seen)


def test_a_bare_question_follows_pictures_that_came_one_at_a_time() -> None:
    for seed in range(300):
        together = 0
        for turn in held_out("chat", seed, [DEFAULT_FONT]).turns:
            together = len(turn.scenes) or together
            if together > 1:
                assert turn.kind == "which" or re.search(r"picture \d", turn.question), (
                    turn.question
                )


def test_counts_of_one_to_six_all_occur() -> None:
    counts = Counter(
        len(held_out("count", seed, [DEFAULT_FONT]).turns[0].scenes[0].shapes)
        for seed in range(300)
    )
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    assert min(counts.values()) > 25


def test_words_to_read_are_never_single_tokens() -> None:
    tokens = set(vocabulary())
    assert not [word for word in KNOWN_WORDS if word in tokens or f"Ġ{word}" in tokens]
    assert all(2 < len(word) <= 6 and set(word) <= set(LETTERS) for word in KNOWN_WORDS)
    assert len(set(KNOWN_WORDS)) == len(KNOWN_WORDS) >= 100


def test_small_talk_has_one_answer_for_a_question() -> None:
    questions = [question for question, _ in SMALL_TALK]
    assert len(set(questions)) == len(questions)
