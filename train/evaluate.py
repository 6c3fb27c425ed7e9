"""Held-out accuracy of the demo model through an OpenAI-compatible API: `python -m
train.evaluate --base-url URL --num-prompts 200` while `saccade serve` is running.

An answer is correct if its text is exactly the expected one. Images are sent as PNG data URLs of
various sizes (sides of 96 to 256 px, seldom multiples of 32). In a chat, the history has the
model's own answers.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from saccade_bench.drawn.draw import (
    DEFAULT_FONT,
    HELD_OUT_FONTS,
    Scene,
    installed_fonts,
    render,
    training_fonts,
)
from saccade_bench.drawn.tasks import SKILLS, TWO_HOPS, Exchange, Task, held_out

ChatMessage = dict[str, Any]
Ask = Callable[[list[ChatMessage]], str]
"""The interface of a model: takes OpenAI chat messages and returns text."""
READING = ("number", "word")
ANSWER_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"answer": {"type": "string"}},
            "required": ["answer"],
            "additionalProperties": False,
        },
    },
}
LARGE, ANY_SIZE = 28, 10_000
"""Text of at least this size in px is also scored separately: a digit is then about as wide as a
patch of the vision encoder.
"""


@dataclass(frozen=True)
class Miss:
    """A wrong answer."""

    seed: int
    question: str
    expected: str
    answer: str


@dataclass(frozen=True)
class Score:
    """Accuracy of one skill. `error` is the standard error of the accuracy."""

    skill: str
    fonts: str
    right: int
    count: int
    misses: tuple[Miss, ...]

    @property
    def accuracy(self) -> float:
        return self.right / self.count if self.count else 0.0

    @property
    def error(self) -> float:
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(1, self.count))


def data_url(scene: Scene) -> str:
    buffer = io.BytesIO()
    render(scene).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def user_message(turn: Exchange) -> ChatMessage:
    """Return a turn as an OpenAI message: its images, then the question."""
    if not turn.scenes:
        return {"role": "user", "content": turn.question}
    scenes = [{"type": "image_url", "image_url": {"url": data_url(scene)}} for scene in turn.scenes]
    return {"role": "user", "content": [*scenes, {"type": "text", "text": turn.question}]}


def ask_task(ask: Ask, task: Task) -> list[str]:
    """Return the answers to all turns. Each turn sends the entire chat so far, with the model's own
    answers.
    """
    messages: list[ChatMessage] = []
    answers = []
    for turn in task.turns:
        messages.append(user_message(turn))
        answers.append(ask(messages).strip())
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def score_skill(
    ask: Ask, skill: str, seeds: Sequence[int], fonts: tuple[str, ...], label: str, threads: int
) -> Score:
    """Ask `len(seeds)` tasks of a skill. In "chat", every turn counts as one question."""
    tasks = [held_out(skill, seed, fonts) for seed in seeds]
    with ThreadPoolExecutor(threads) as pool:
        answered = pool.map(lambda task: ask_task(ask, task), tasks)
        answers = list(track(answered, description=f"{skill:10}", total=len(tasks), transient=True))
    count, misses = 0, []
    for seed, task, texts in zip(seeds, tasks, answers, strict=True):
        for turn, text in zip(task.turns, texts, strict=True):
            count += 1
            if text != turn.answer:
                misses.append(Miss(seed, turn.question, turn.answer, text))
    return Score(skill, label, count - len(misses), count, tuple(misses))


def font_sets() -> dict[str, tuple[str, ...]]:
    """Return the sets of fonts for which reading is scored: Pillow's built-in font, all training
    fonts, and fonts that are never used in training.
    """
    sets: dict[str, tuple[str, ...]] = {"default": (DEFAULT_FONT,)}
    if len(training_fonts()) > 1:
        sets["varied"] = training_fonts()
    unseen = tuple(name for name in installed_fonts() if name in HELD_OUT_FONTS)
    if unseen:
        sets["unseen"] = unseen
    return sets


def of_size(score: Score, seeds: Sequence[int], fonts: tuple[str, ...], sizes: range) -> Score:
    """Return the part of a reading skill's score for texts of these sizes (px)."""

    def size(seed: int) -> int:
        text = held_out(score.skill, seed, fonts).turns[0].scenes[0].text
        assert text is not None
        return text.size

    label = (
        f"{score.fonts}, from {sizes.start} px"
        if sizes.stop >= ANY_SIZE
        else f"{score.fonts}, below {sizes.stop} px"
    )
    return _part(score, label, {seed for seed in seeds if size(seed) in sizes})


def of_pictures(score: Score, seeds: Sequence[int], fonts: tuple[str, ...], count: int) -> Score:
    """Return the part of a single-turn skill's score for tasks with this number of images."""
    kept = {
        seed for seed in seeds if len(held_out(score.skill, seed, fonts).turns[0].scenes) == count
    }
    return _part(score, f"{score.fonts}, {count} images", kept)


def _part(score: Score, label: str, seeds: Collection[int]) -> Score:
    misses = tuple(miss for miss in score.misses if miss.seed in seeds)
    return Score(score.skill, label, len(seeds) - len(misses), len(seeds), misses)


def evaluate(
    ask: Ask, count: int, skills: Sequence[str] = SKILLS, first: int = 0, threads: int = 4
) -> list[Score]:
    """Score all skills, with `count` tasks each from seed `first` on. Reading skills are scored for
    each set of fonts, and by text size. Two-hop questions are also scored by the number of images.
    """
    seeds = range(first, first + count)
    scores: list[Score] = []
    for skill in skills:
        sets = font_sets()
        label = "varied" if "varied" in sets else "default"
        if skill not in READING:
            sets = {label: sets[label]}
        found = {
            label: score_skill(ask, skill, seeds, fonts, label, threads)
            for label, fonts in sets.items()
        }
        scores += found.values()
        if skill in READING:
            scores += [
                of_size(found[label], seeds, sets[label], sizes)
                for sizes in (range(LARGE, ANY_SIZE), range(LARGE))
            ]
        if skill == TWO_HOPS:
            scores += [
                of_pictures(found[label], seeds, sets[label], images) for images in (2, 3, 4)
            ]
    return scores


def print_scores(scores: Sequence[Score], misses: int = 0) -> None:
    table = Table("skill", "fonts", "n", "right", "accuracy", "std. error")
    for score in scores:
        share, error = f"{100 * score.accuracy:.1f} %", f"{100 * score.error:.1f}"
        table.add_row(score.skill, score.fonts, str(score.count), str(score.right), share, error)
    console = Console()
    console.print(table)
    for score in scores:
        for miss in score.misses[:misses]:
            console.print(
                f"{score.skill} {miss.seed}: {miss.question} expected {miss.expected!r}, got "
                f"{miss.answer!r}",
                markup=False,
            )


def as_json(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [
        {**asdict(score), "accuracy": round(score.accuracy, 4), "error": round(score.error, 4)}
        for score in scores
    ]


def read_object(text: str) -> str:
    """Return the string in {"answer": string}, or the text if it is not a complete object."""
    try:
        return str(json.loads(text)["answer"])
    except (ValueError, TypeError, KeyError):
        return text


@contextmanager
def http_asker(
    base_url: str, model: str | None, key: str | None, as_objects: bool = False
) -> Iterator[Ask]:
    """Yield a function that asks an OpenAI-compatible server, with greedy sampling.

    as_objects: ask for a JSON object with one string, and return that string, or the whole text if
    it is not such an object.

    Raises httpx's errors. HTTPStatusError has the server's reply in its message.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    root = base_url.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=root, headers=headers, timeout=120) as client:
        if model is None:
            models = client.get("/v1/models").raise_for_status().json()
            model = models["data"][0]["id"]

        def ask(messages: list[ChatMessage]) -> str:
            body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 48}
            if as_objects:
                body |= {"max_tokens": 64, "response_format": ANSWER_FORMAT}
            reply = client.post("/v1/chat/completions", json=body)
            if reply.is_error:
                raise httpx.HTTPStatusError(
                    f"{reply.status_code}: {reply.text}", request=reply.request, response=reply
                )
            text = str(reply.json()["choices"][0]["message"]["content"])
            return read_object(text) if as_objects else text

        yield ask


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000", help="the server (with or without /v1)"
    )
    parser.add_argument("--model", help="model name; default: the first that the server names")
    parser.add_argument("--api-key")
    parser.add_argument("--num-prompts", type=int, default=200, help="tasks per skill")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--threads", type=int, default=8, help="requests at a time")
    parser.add_argument("--skills", nargs="*", default=list(SKILLS), choices=(*SKILLS, TWO_HOPS))
    parser.add_argument(
        "--misses", type=int, default=0, help="print so many wrong answers per skill"
    )
    parser.add_argument(
        "--as-objects",
        action="store_true",
        help="ask for JSON objects with one string (response_format), and score the string",
    )
    parser.add_argument("--json", type=Path, help="write the scores and every wrong answer here")
    args = parser.parse_args()
    try:
        with http_asker(args.base_url, args.model, args.api_key, args.as_objects) as ask:
            scores = evaluate(ask, args.num_prompts, args.skills, args.first, args.threads)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        parser.exit(1, f"error: --base-url {args.base_url}: {error}\n")
    print_scores(scores, args.misses)
    if args.json:
        args.json.write_text(json.dumps(as_json(scores), indent=1) + "\n")


if __name__ == "__main__":
    main()
