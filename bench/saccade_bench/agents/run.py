"""Run an agent with screenshots against a server, and measure each step: prompt tokens computed,
images encoded, and time to first token.

In each step, the agent sends a screenshot and a question, receives an answer, and executes an
action.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from saccade_bench.agents.habits import Habit, History, Json
from saccade_bench.image_files import data_url, save
from saccade_bench.metrics import series

SYSTEM = "You operate a computer by looking at its screen. Answer with one action."
WORDS = ("open", "close", "next", "find", "type", "red", "blue", "save", "file", "menu")


@dataclass(frozen=True)
class AgentStep:
    """The measurements of one request. `ttft` is in seconds.

    computed: prompt tokens that were not cached.
    ahead, vain: tokens that the server precomputed for this prompt, and that were used or wasted.
    changed: the server's reason why precomputed tokens did not match.
    told: True if the server reports cached tokens.
    """

    prompt: int
    computed: int
    ttft: float
    text: str
    ahead: int = 0
    vain: int = 0
    changed: str = ""
    told: bool = True


@dataclass(frozen=True)
class AgentTask:
    """An agent's task. `size` is (width, height) of its screenshots."""

    steps: int = 14
    size: tuple[int, int] = (640, 360)
    max_tokens: int = 16
    seed: int = 0
    salt: str = ""


def screenshots(task: AgentTask) -> Iterator[str]:
    """Yield screenshots of a desktop with moving windows, as data URLs."""
    draw = np.random.default_rng(task.seed)
    width, height = task.size
    screen = np.full((height, width, 3), draw.integers(90, 200, 3), np.uint8)
    while True:
        top, left = int(draw.integers(0, height // 2)), int(draw.integers(0, width // 2))
        screen[top : top + height // 3, left : left + width // 3] = draw.integers(0, 255, 3)
        yield data_url(save(screen))


def act(
    url: str,
    model: str,
    habit: Habit,
    task: AgentTask,
    act: Callable[[], None],
    client: httpx.Client,
) -> list[AgentStep]:
    """Run one agent. `act` is called between an answer and the next screenshot."""
    history: History = [{"role": "system", "content": SYSTEM}]
    draw, steps = random.Random(task.seed), []
    for shot, _ in zip(screenshots(task), range(task.steps)):
        history.append(question(draw, shot))
        step = ask(url, model, habit.trim(history), task, client)
        history.append({"role": "assistant", "content": step.text})
        steps.append(step)
        act()
    return steps


def question(draw: random.Random, shot: str) -> Json:
    """Return a user message with a question and a screenshot."""
    asked = f"what next? {' '.join(draw.choices(WORDS, k=3))}"
    image = {"type": "image_url", "image_url": {"url": shot}}
    return {"role": "user", "content": [{"type": "text", "text": asked}, image]}


def ask(
    url: str, model: str, messages: History, task: AgentTask, client: httpx.Client
) -> AgentStep:
    """Stream one answer, and return its measurements."""
    body: Json = {
        "model": model,
        "messages": messages,
        "max_tokens": task.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "saccade": {"trace": True},
    }
    if task.salt:
        body["cache_salt"] = task.salt
    text: list[str] = []
    begun, first = time.monotonic(), 0.0
    usage: Json = {}
    told: Json = {}
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.is_error:
            answer.read()
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.monotonic()
                    text.append(piece)
            usage = chunk.get("usage") or usage
            told = chunk.get("saccade") or told
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    prompt = usage["prompt_tokens"]
    ahead = told.get("ahead") or {}
    return AgentStep(
        prompt,
        prompt - (cached or 0),
        (first or time.monotonic()) - begun,
        "".join(text),
        ahead.get("used", 0),
        ahead.get("prepared", 0) - ahead.get("used", 0),
        ahead.get("changed", ""),
        cached is not None,
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def counters(url: str, client: httpx.Client) -> dict[str, float]:
    """Return a Saccade server's counters, or an empty dict for another server."""
    answer = client.get(f"{url}/metrics")
    return series(answer.text) if answer.is_success else {}
