"""Questions for the demo model: conversations about drawn images, in which each question has one
correct answer.

A question without "in picture k" is about the last image. Such questions are only asked if the
latest images were sent one at a time.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from saccade_bench.drawn.draw import (
    COLOURS,
    MIN_FONT,
    SHAPES,
    Scene,
    draw_shapes_scene,
    draw_size,
    draw_text_scene,
    training_fonts,
)
from saccade_bench.drawn.words import KNOWN_WORDS

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TWO_HOPS = "two hops"
"""The skill of comparing two images. Not one of `SKILLS`, on which the demo model was trained."""


@dataclass(frozen=True)
class Exchange:
    """One question with its images, and its answer. `kind` is the name of the skill."""

    kind: str
    scenes: tuple[Scene, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A conversation. `kind` is the skill, or "chat" if it has different ones."""

    kind: str
    turns: tuple[Exchange, ...]


@dataclass(frozen=True)
class Difficulty:
    """Parameters for the difficulty of conversations."""

    digits: int = 6
    letters: int = 7
    objects: int = 3
    count: int = 6
    scenes: int = 4
    small: int = MIN_FONT  # px, the smallest font size
    text: float = math.inf  # px, the largest font size
    random_words: float = 0.0  # fraction of words with random letters; only used in training
    asking: tuple[float, float, float, float] = (
        3,
        3,
        3,
        2,
    )  # weights of describe, count, colour, shape
    which: float = 0.45  # fraction of "which picture" among questions about several images


@dataclass(frozen=True)
class Draw:
    """Arguments of all drawing functions: the random generator, the difficulty, and the fonts."""

    rng: random.Random
    level: Difficulty
    fonts: tuple[str, ...]


EASIEST = Difficulty(digits=2, letters=3, objects=2, count=3, scenes=2, random_words=0.3)
HARDEST = Difficulty(small=18)

SMALL_TALK: tuple[tuple[str, str], ...] = tuple(
    (question, answer)
    for questions, answer in (
        (
            ("Who are you?", "What are you?", "What is your name?"),
            "I am the Saccade demo model. I can read numbers and short words, and name colours "
            "and shapes.",
        ),
        (
            ("What can you do?", "Help", "How can you help me?"),
            "I can read numbers and short words, name colours and shapes, count, and compare "
            "pictures.",
        ),
        (("Hello", "Hello!", "Hi", "Hi!", "Hi there!"), "Hello! Show me a picture."),
        (("Thank you.", "Thank you!", "Thanks!", "Thanks"), "You are welcome."),
        (("Goodbye", "Bye", "Bye!"), "Goodbye!"),
    )
    for question in questions
)


# Descriptions of scenes


def plural(kind: str) -> str:
    return kind + ("es" if kind == "cross" else "s")


def thing(colour: str, kind: str) -> str:
    """Return a phrase such as "a red circle" or "an orange star"."""
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {kind}"


def is_number(scene: Scene) -> bool:
    return scene.text is not None and scene.text.text.isdigit()


def describe(scene: Scene) -> str:
    """Return the content of an image as a phrase without a full stop, such as "a red circle and a
    blue star".
    """
    if scene.text is not None:
        return f"the {'number' if is_number(scene) else 'word'} {scene.text.text.lower()}"
    names = [thing(shape.colour, shape.kind) for shape in scene.shapes]
    if len(names) > 3:
        kinds = {shape.kind for shape in scene.shapes}
        return f"{len(names)} {plural(kinds.pop() if len(kinds) == 1 else 'shape')}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# Scenes


def number_scene(draw: Draw, size: tuple[int, int]) -> Scene:
    digits = draw.rng.randint(1, draw.level.digits)
    return draw_text_scene(
        draw.rng,
        "".join(draw.rng.choice("0123456789") for _ in range(digits)),
        size,
        draw.fonts,
        (draw.level.small, draw.level.text),
    )


def word_scene(draw: Draw, size: tuple[int, int]) -> Scene:
    """Draw a known word (or, for training, random letters) in lower case, capitalized or in upper
    case.
    """
    rng = draw.rng
    if rng.random() < draw.level.random_words:
        word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, draw.level.letters)))
    else:
        word = rng.choice([word for word in KNOWN_WORDS if len(word) <= max(3, draw.level.letters)])
    form = rng.choice([word, word.capitalize(), word.upper()])
    return draw_text_scene(rng, form, size, draw.fonts, (draw.level.small, draw.level.text))


def shapes_scene(draw: Draw, size: tuple[int, int], objects: int | None = None) -> Scene:
    """Draw one to three shapes. Most have different colours and kinds, but some share one."""
    rng = draw.rng
    count = objects or rng.randint(1, draw.level.objects)
    if rng.random() < 0.7:
        things = list(zip(rng.sample(list(COLOURS), count), rng.sample(SHAPES, count), strict=True))
    else:
        things = [(rng.choice(list(COLOURS)), rng.choice(SHAPES)) for _ in range(count)]
    return draw_shapes_scene(rng, _compatible(rng, things), size)


def count_scene(draw: Draw, size: tuple[int, int]) -> Scene:
    """Draw one to six shapes of the same kind, in one to three colours."""
    rng = draw.rng
    kind, count = rng.choice(SHAPES), rng.randint(1, draw.level.count)
    palette = rng.sample(list(COLOURS), rng.choice([1, 1, 2, 3]))
    return draw_shapes_scene(
        rng, _compatible(rng, [(rng.choice(palette), kind) for _ in range(count)]), size
    )


def _compatible(rng: random.Random, things: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace black in half of the cases if there is also white because few backgrounds fit
    both.
    """
    colours = {colour for colour, _ in things}
    if {"black", "white"} <= colours and rng.random() < 0.5:
        unused = next(colour for colour in COLOURS if colour not in colours)
        return [(unused if colour == "black" else colour, kind) for colour, kind in things]
    return things


SceneMaker = Callable[[Draw, tuple[int, int]], Scene]
SCENES: dict[str, SceneMaker] = {
    "number": number_scene,
    "word": word_scene,
    "shapes": shapes_scene,
    "count": count_scene,
}


# Questions about one scene. `where` is "" or " in picture k".

Question = tuple[str, str, str]  # kind, question, answer


def ask_number(draw: Draw, scene: Scene, where: str) -> Question | None:
    if not is_number(scene) or scene.text is None:
        return None
    forms = [
        "What number is this?",
        "What is the number?",
        "Read the number.",
        "What number is in the picture?",
        "Which number is this?",
    ]
    if where:
        forms = [
            f"What number is{where}?",
            f"What is the number{where}?",
            f"Read the number{where}.",
        ]
    return "number", draw.rng.choice(forms), f"The number is {scene.text.text}."


def ask_word(draw: Draw, scene: Scene, where: str) -> Question | None:
    if scene.text is None or is_number(scene):
        return None
    forms = [
        "What word is this?",
        "What is the word?",
        "Read the word.",
        "What word is in the picture?",
        "Which word is this?",
    ]
    if where:
        forms = [f"What word is{where}?", f"What is the word{where}?", f"Read the word{where}."]
    return "word", draw.rng.choice(forms), f"The word is {scene.text.text.lower()}."


def ask_text(draw: Draw, scene: Scene, where: str) -> Question | None:
    if scene.text is None:
        return None
    forms = [
        "What does it say?",
        "What does the picture say?",
        "Read the text.",
        "What is written here?",
    ]
    if where:
        forms = [f"What is written{where}?", f"Read the text{where}."]
    return "text", draw.rng.choice(forms), f"It says {scene.text.text.lower()}."


def ask_describe(draw: Draw, scene: Scene, where: str) -> Question | None:
    if where:
        image = where.removeprefix(" in ")
        form = draw.rng.choice(
            [
                f"What is{where}?",
                f"Describe {image}.",
                f"What does {image} show?",
                f"What do you see{where}?",
            ]
        )
        return "picture k", form, f"{image.capitalize()} shows {describe(scene)}."
    forms = [
        "What is in the picture?",
        "Describe the picture.",
        "What do you see?",
        "What is this?",
        "What does the picture show?",
    ]
    phrase = describe(scene)
    return "describe", draw.rng.choice(forms), f"{phrase[0].upper()}{phrase[1:]}."


def ask_count(draw: Draw, scene: Scene, where: str) -> Question | None:
    if not scene.shapes:
        return None
    kinds = Counter(shape.kind for shape in scene.shapes)
    kind, count = draw.rng.choice(sorted(kinds.items()))
    if draw.rng.random() < 0.2:
        kind, count = "shape", len(scene.shapes)
    things = plural(kind)
    forms = [
        f"How many {things} are there{where}?",
        f"How many {things} do you see{where}?",
        f"Count the {things}{where}.",
    ]
    if not where:
        forms.append(f"How many {things} are in the picture?")
    answer = f"There is 1 {kind}." if count == 1 else f"There are {count} {things}."
    return "count", draw.rng.choice(forms), answer


def ask_colour(draw: Draw, scene: Scene, where: str) -> Question | None:
    kinds = Counter(shape.kind for shape in scene.shapes)
    unique = [shape for shape in scene.shapes if kinds[shape.kind] == 1]
    if not unique:
        return None
    shape = draw.rng.choice(unique)
    word = draw.rng.choice(["colour", "colour", "color"])
    forms = [
        f"What {word} is the {shape.kind}{where}?",
        f"Which {word} is the {shape.kind}{where}?",
    ]
    if not where:
        forms.append(f"What is the {word} of the {shape.kind}?")
    return "colour", draw.rng.choice(forms), f"The {shape.kind} is {shape.colour}."


def ask_shape(draw: Draw, scene: Scene, where: str) -> Question | None:
    colours = Counter(shape.colour for shape in scene.shapes)
    unique = [shape for shape in scene.shapes if colours[shape.colour] == 1]
    if not unique:
        return None
    shape = draw.rng.choice(unique)
    forms = [
        f"What shape is {shape.colour}{where}?",
        f"Which shape is {shape.colour}{where}?",
        f"What is the {shape.colour} shape{where}?",
    ]
    return "shape", draw.rng.choice(forms), f"The {shape.colour} shape is a {shape.kind}."


def ask_which(draw: Draw, scenes: Sequence[Scene]) -> Question | None:
    """Ask "Which picture shows ...?" for something that exactly one of the images shows."""
    found: Counter[str] = Counter()
    for scene in scenes:
        found.update(_findable(scene))
    pairs = [
        (name, k)
        for k, scene in enumerate(scenes, 1)
        for name in sorted(_findable(scene))
        if found[name] == 1
    ]
    if len(scenes) < 2 or not pairs:
        return None
    name, k = draw.rng.choice(pairs)
    forms = [
        f"Which picture shows the {name}?",
        f"Which picture has the {name}?",
        f"Where is the {name}?",
    ]
    return "which", draw.rng.choice(forms), f"The {name} is in picture {k}."


def _findable(scene: Scene) -> set[str]:
    """Return the names of things in a scene to ask for, such as "red circle" or "number"."""
    if scene.text is not None:
        return {"number" if is_number(scene) else "word"}
    if len(scene.shapes) > 3:
        return set()
    return {f"{shape.colour} {shape.kind}" for shape in scene.shapes}


Asker = Callable[[Draw, Scene, str], Question | None]
ASKERS: dict[str, Asker] = {
    "number": ask_number,
    "word": ask_word,
    "text": ask_text,
    "describe": ask_describe,
    "count": ask_count,
    "colour": ask_colour,
    "shape": ask_shape,
}


# Questions about two images (two hops: find what both show, then compare)


def two_hops(draw: Draw, sizes: Sequence[tuple[int, int]], turns: int = 1) -> Task:
    """Return a chat that shows images of these sizes (at least two) and asks to compare two.

    The answer says what each of the two shows, then "Yes." or "No.", with equal probability. Any
    further turns are ordinary questions about the same images.
    """
    rng = draw.rng
    first, second = rng.sample(range(len(sizes)), 2)
    about = rng.choice(("number", "colour", "shape"))
    scenes = [rng.choice((shapes_scene, number_scene))(draw, size) for size in sizes]
    pair = _comparable(draw, about, (sizes[first], sizes[second]))
    scenes[first], scenes[second] = pair
    question, answer = ask_compare(about, pair, (first + 1, second + 1))
    done = [Exchange(TWO_HOPS, tuple(scenes), question, answer)]
    for _ in range(turns - 1):
        kind, question, answer = _ask_any(draw, scenes, False)
        done.append(Exchange(kind, (), question, answer))
    return Task(TWO_HOPS, tuple(done))


def _comparable(
    draw: Draw, about: str, sizes: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[Scene, Scene]:
    """Draw two different numbers, or two shapes, half of which share a colour or kind."""
    rng = draw.rng
    if about == "number":
        one, two = (number_scene(draw, size) for size in sizes)
        return (one, two) if _value(one) != _value(two) else _comparable(draw, about, sizes)
    colours, kinds = rng.sample(list(COLOURS), 2), rng.sample(SHAPES, 2)
    if rng.random() < 0.5:
        same = colours if about == "colour" else kinds
        same[1] = same[0]
    one, two = (
        draw_shapes_scene(rng, [thing], size)
        for thing, size in zip(zip(colours, kinds, strict=True), sizes, strict=True)
    )
    return one, two


def ask_compare(about: str, pair: tuple[Scene, Scene], places: tuple[int, int]) -> tuple[str, str]:
    """Return a question about a pair of images, counted from 1, and its answer. about: "number",
    "colour" or "shape".
    """
    one, two = pair
    i, j = places
    if about == "number":
        question = f"Is the number in picture {i} larger than in picture {j}?"
        holds = _value(one) > _value(two)
    elif about == "colour":
        question = f"Do picture {i} and picture {j} have the same colour?"
        holds = one.shapes[0].colour == two.shapes[0].colour
    else:
        question = f"Do picture {i} and picture {j} have the same shape?"
        holds = one.shapes[0].kind == two.shapes[0].kind
    facts = f"Picture {i} shows {describe(one)}. Picture {j} shows {describe(two)}."
    return question, f"{facts} {'Yes' if holds else 'No'}."


def _value(scene: Scene) -> int:
    assert scene.text is not None
    return int(scene.text.text)


# Single skills (for the held-out evaluation and the demo)


def _single(draw: Draw, kind: str, scene: Scene, ask: Asker) -> Task | None:
    asked = ask(draw, scene, "")
    return (
        None if asked is None else Task(kind, (Exchange(asked[0], (scene,), asked[1], asked[2]),))
    )


def _try_skill(kind: str, draw: Draw) -> Task | None:
    rng = draw.rng
    if kind in ("number", "word"):
        return _single(draw, kind, SCENES[kind](draw, draw_size(rng)), ASKERS[kind])
    if kind == "describe":
        return _single(draw, kind, shapes_scene(draw, draw_size(rng)), ask_describe)
    if kind == "count":
        return _single(draw, kind, count_scene(draw, draw_size(rng)), ask_count)
    if kind in ("colour", "shape"):
        return _single(
            draw, kind, shapes_scene(draw, draw_size(rng), rng.randint(2, 3)), ASKERS[kind]
        )
    if kind == "picture k":
        scenes = [
            rng.choice([shapes_scene, shapes_scene, number_scene])(draw, draw_size(rng))
            for _ in range(rng.randint(2, 4))
        ]
        k = rng.randint(1, len(scenes))
        asked = ask_describe(draw, scenes[k - 1], f" in picture {k}")
    elif kind == "which":
        scenes = [shapes_scene(draw, draw_size(rng), rng.randint(1, 2)) for _ in range(2)]
        asked = ask_which(draw, scenes)
    elif kind == TWO_HOPS:
        return two_hops(draw, [draw_size(rng) for _ in range(rng.randint(2, 4))])
    else:
        raise ValueError(f"unknown skill {kind!r}; known: {', '.join((*SKILLS, TWO_HOPS))}")
    return (
        None
        if asked is None
        else Task(kind, (Exchange(asked[0], tuple(scenes), asked[1], asked[2]),))
    )


SKILLS = ("number", "word", "describe", "shape", "colour", "count", "picture k", "which", "chat")


def held_out(kind: str, seed: int, fonts: Sequence[str] | None = None) -> Task:
    """Return the `seed`-th task of a skill at full difficulty. Training never uses these seeds."""
    rng = random.Random(f"held out/{kind}/{seed}")
    draw = Draw(rng, HARDEST, tuple(fonts or training_fonts()))
    while True:
        task = conversation(draw) if kind == "chat" else _try_skill(kind, draw)
        if task is not None and (kind != "chat" or len(task.turns) >= 3):
            return task


# Conversations (for training, and the held-out skill "chat")


def conversation(
    draw: Draw,
    sizes: Sequence[tuple[int, int]] | None = None,
    turns: tuple[int, int] = (2, 5),
    weights: Sequence[float] | None = None,
) -> Task:
    """Return a chat with several turns, some of which add images.

    `sizes` fixes the number of images and their sizes. By default, there are up to `level.scenes`
    of any size. `weights` are the weights of the kinds of scenes, in the order of `SCENES`.
    """
    rng = draw.rng
    if sizes is None:
        sizes = [draw_size(rng) for _ in range(rng.randint(1, draw.level.scenes))]
    weights = weights or ((3, 2, 4, 3) if len(sizes) == 1 else (2, 1, 5, 1))
    waiting = [SCENES[rng.choices(tuple(SCENES), weights)[0]](draw, size) for size in sizes]
    seen: list[Scene] = []
    done: list[Exchange] = []
    asked: set[str] = set()
    single = True
    wanted = max(rng.randint(*turns), 1)
    while waiting or len(done) < wanted:
        new: list[Scene] = []
        if waiting and (not seen or rng.random() < 0.6 or len(done) >= wanted):
            together = len(waiting) if rng.random() < 0.5 else 1
            new, waiting = waiting[:together], waiting[together:]
            single = together == 1
            seen += new
        question = _ask_any(draw, seen, single)
        if question[1] in asked and not new and not waiting:
            break
        asked.add(question[1])
        done.append(Exchange(question[0], tuple(new), question[1], question[2]))
    return Task("chat", tuple(done))


def _ask_any(draw: Draw, seen: Sequence[Scene], single: bool) -> Question:
    """Return a question with one answer: about the last image, about image k, or about which image
    shows something.
    """
    rng = draw.rng
    while True:
        asked: Question | None = None
        if len(seen) > 1 and rng.random() < draw.level.which:
            asked = ask_which(draw, seen)
        elif len(seen) > 1 and (not single or rng.random() < 0.6):
            k = rng.randint(1, len(seen))
            asked = _ask_scene(draw, seen[k - 1], f" in picture {k}")
        elif single:
            asked = _ask_scene(draw, seen[-1], "")
        if asked is not None:
            return asked


def _ask_scene(draw: Draw, scene: Scene, where: str) -> Question | None:
    rng = draw.rng
    if scene.text is not None:
        kind = rng.choices(("number", "word", "text", "describe"), (3, 3, 1, 2))[0]
    else:
        kind = rng.choices(("describe", "count", "colour", "shape"), draw.level.asking)[0]
    return ASKERS[kind](draw, scene, where)


def small_talk(rng: random.Random) -> Task:
    question, answer = rng.choice(SMALL_TALK)
    return Task("talk", (Exchange("talk", (), question, answer),))
