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
    TWO_HOPS,
    Draw,
    Exchange,
    conversation,
    describe,
    held_out,
    is_number,
    plural,
    two_hops,
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


def compared_in_scenes(question: str, scenes: list[Scene]) -> str:
    """Derive the answer of a two-hop question from its words and the scenes."""
    i, j = (int(number) for number in re.findall(r"picture (\d)", question))
    one, two = scenes[i - 1], scenes[j - 1]
    if "larger" in question:
        assert one.text and two.text and one.text.text != two.text.text
        holds = int(one.text.text) > int(two.text.text)
    else:
        name = "colour" if "colour" in question else "shape"
        shown = [
            {shape.colour if name == "colour" else shape.kind for shape in scene.shapes}
            for scene in (one, two)
        ]
        assert [len(each) for each in shown] == [1, 1]
        holds = shown[0] == shown[1]
    facts = f"Picture {i} shows {describe(one)}. Picture {j} shows {describe(two)}."
    return f"{facts} {'Yes' if holds else 'No'}."


def test_two_hop_answers_follow_from_the_scenes_and_are_balanced() -> None:
    verdicts: dict[str, Counter[str]] = {"Is": Counter(), "colour": Counter(), "shape": Counter()}
    images: Counter[int] = Counter()
    for seed in range(600):
        (turn,) = held_out(TWO_HOPS, seed, [DEFAULT_FONT]).turns
        assert turn.answer == compared_in_scenes(turn.question, list(turn.scenes)), seed
        kind = next(kind for kind in verdicts if kind in turn.question)
        verdicts[kind][turn.answer.split()[-1]] += 1
        images[len(turn.scenes)] += 1
    assert set(images) == {2, 3, 4}
    for counts in verdicts.values():
        assert set(counts) == {"Yes.", "No."}
        assert 0.4 < counts["Yes."] / counts.total() < 0.6
    yes = sum(counts["Yes."] for counts in verdicts.values())
    assert 0.45 < yes / 600 < 0.55


def test_turns_after_a_comparison_are_about_its_images() -> None:
    draw = Draw(random.Random(3), HARDEST, (DEFAULT_FONT,))
    for _ in range(50):
        first, *rest = two_hops(draw, [(128, 96), (96, 128), (160, 160)], 3).turns
        scenes = list(first.scenes)
        assert first.answer == compared_in_scenes(first.question, scenes)
        assert len(scenes) == 3 and len(rest) == 2
        for turn in rest:
            assert turn.scenes == ()
            assert turn.answer == answer_from_scenes(turn, scenes)


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
