"""Conversations of published workloads with repeated images.

A conversation is a generator that yields requests, and is sent the answer to each.

    window        Dynamo's: each turn sends the newest images, of which all but one were sent before
    identical     sgl-bench's four: the same request twice,
    same-images       the same images with another text,
    half-seen         repeated images followed by new ones,
    growing-chat      a chat with one new image in each round
    trimming      an agent that trims its history, with one of several strategies
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from saccade_bench.agents.habits import HABITS, History, Json, images
from saccade_bench.agents.run import SYSTEM, WORDS, AgentTask, question, screenshots


@dataclass(frozen=True)
class WorkloadSize:
    """The size of a workload.

    users: number of concurrent users.
    turns: turns of a window, a chat or an agent.
    counts: numbers of images in a request or a window.
    resolution: (width, height) of images in pixels.
    words: words of text.
    habits: strategies of agents for trimming their history.
    """

    users: int = 2
    turns: int = 8
    counts: tuple[int, ...] = (2, 4)
    resolution: tuple[int, int] = (320, 180)
    words: int = 100
    max_tokens: int = 16
    habits: tuple[str, ...] = ("append", "keep-1", "keep-3", "keep-5", "fours", "window")


@dataclass(frozen=True)
class Sent:
    """A request, with its number of new images and of repeated ones."""

    messages: History
    new: int
    seen: int


Conversation = Generator[Sent, str, None]
Group = tuple[str, Callable[[int], Conversation]]
"""A name, and a function from a seed to a user's conversation."""


def window(size: WorkloadSize, count: int, seed: int) -> Conversation:
    """Send a window of `count` images that advances by one in each turn."""
    draw, shots = random.Random(seed), screens(size, seed)
    text = words(draw, size.words)
    shown = [next(shots) for _ in range(count)]
    for turn in range(size.turns):
        if turn:
            shown = [*shown[1:], next(shots)]
        new = 1 if turn else count
        yield Sent(asked(shown, f"{text} {words(draw, 3)}", text_first=True), new, count - new)


def identical(size: WorkloadSize, count: int, seed: int) -> Conversation:
    """Send the same request twice."""
    shots = screens(size, seed)
    messages = asked([next(shots) for _ in range(count)], words(random.Random(seed), size.words))
    yield Sent(messages, count, 0)
    yield Sent(messages, 0, count)


def same_images(size: WorkloadSize, count: int, seed: int) -> Conversation:
    """Send the same images with two different texts."""
    draw, shots = random.Random(seed), screens(size, seed)
    shown = [next(shots) for _ in range(count)]
    yield Sent(asked(shown, words(draw, size.words)), count, 0)
    yield Sent(asked(shown, words(draw, size.words)), 0, count)


def half_seen(size: WorkloadSize, count: int, seed: int) -> Conversation:
    """Send `count` images, and then the same followed by max(size.counts) new ones."""
    draw, shots, new = random.Random(seed), screens(size, seed), max(size.counts)
    shown = [next(shots) for _ in range(count + new)]
    yield Sent(asked(shown[:count], words(draw, size.words)), count, 0)
    yield Sent(asked(shown, words(draw, size.words)), new, count)


def growing_chat(size: WorkloadSize, seed: int) -> Conversation:
    """Send a chat with one new image in each round."""
    draw, shots = random.Random(seed), screens(size, seed)
    history: History = []
    for turn in range(size.turns):
        history += asked([next(shots)], words(draw, size.words))
        answer = yield Sent([*history], 1, turn)
        history.append({"role": "assistant", "content": answer})


def trimming(size: WorkloadSize, habit: str, seed: int) -> Conversation:
    """Act as an agent that trims its history."""
    draw, shots = random.Random(seed), screens(size, seed)
    history: History = [{"role": "system", "content": SYSTEM}]
    for _ in range(size.turns):
        history.append(question(draw, next(shots)))
        sent = HABITS[habit].trim(history)
        answer = yield Sent(sent, 1, sum(map(images, sent)) - 1)
        history.append({"role": "assistant", "content": answer})


def groups(workload: str, size: WorkloadSize) -> list[Group]:
    """Return a workload's groups of conversations: one for each image count, or for each habit and
    task, or a single one.
    """
    if workload == "growing-chat":
        return [("", lambda seed: growing_chat(size, seed))]
    if workload == "trimming":
        return [
            (f"{habit}, task {task}", lambda seed, h=habit: trimming(size, h, seed))  # type: ignore[misc]
            for habit in size.habits
            for task in (1, 2)
        ]
    make = BY_COUNT[workload]
    return [
        (f"{count} images", lambda seed, n=count: make(size, n, seed))  # type: ignore[misc]
        for count in size.counts
    ]


BY_COUNT: Mapping[str, Callable[[WorkloadSize, int, int], Conversation]] = {
    "window": window,
    "identical": identical,
    "same-images": same_images,
    "half-seen": half_seen,
}
WORKLOADS = (*BY_COUNT, "growing-chat", "trimming")


def screens(size: WorkloadSize, seed: int) -> Iterator[str]:
    return screenshots(AgentTask(size=size.resolution, seed=seed))


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def asked(shown: Sequence[str], text: str, *, text_first: bool = False) -> History:
    """Return a user message with images and a text."""
    parts: list[Json] = [{"type": "image_url", "image_url": {"url": url}} for url in shown]
    told: Json = {"type": "text", "text": text}
    return [{"role": "user", "content": [told, *parts] if text_first else [*parts, told]}]
