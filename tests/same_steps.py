"""Answers of random agents, with next prompts computed ahead and without, compared step for step.

    python -m tests.same_steps [--steps 2000] [--seed 0] [--family qwen3_vl ...]

Two servers of one random checkpoint in float32 get the same requests; one of them prepares. Agents
have random habits, pause for random moments, change their habits, and run side by side. Every
greedy answer must be the same text. Ends by itself; the last line counts the steps.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx

from saccade_bench.agents.habits import HABITS, Habit, History
from saccade_bench.agents.run import AgentTask, ask, counters, question, screenshots
from saccade_bench.fixtures.server import Server, serving
from tests.fixtures.tiny import make_checkpoint

FAMILIES = ("qwen3_vl", "qwen3_5")
LONGEST = 14
"""Steps of one agent."""
SIDE_BY_SIDE = 3


def random_habit(draw: random.Random) -> Habit:
    """Return a habit that some harness may have."""
    if draw.random() < 0.5:
        return draw.choice([*HABITS.values()])
    return Habit(
        draw.randint(1, 4),
        draw.randint(1, 3),
        draw.choice(("stub", "content", "nothing", "message", "turn")),
        reminder=draw.choice(("", "", "Be careful.")),
    )


class Compared:
    """Asks two servers, and counts what differs."""

    def __init__(self, one: Server, other: Server) -> None:
        self.urls = one.url, other.url
        self.steps = self.ahead = 0
        self.differing: list[str] = []
        self._lock = threading.Lock()

    def run(self, seed: int) -> int:
        """Run one agent on both. Returns its steps."""
        draw = random.Random(seed)
        habit = random_habit(draw)
        size = draw.choice(((160, 96), (224, 128), (96, 160)))
        task = AgentTask(draw.randint(3, LONGEST), size, draw.randint(1, 16), seed)
        task = replace(task, salt=draw.choice(("", "a", f"{seed}")))
        history: History = [{"role": "system", "content": draw.choice(("", "Look."))}]
        with httpx.Client(timeout=300) as client:
            for number, shot in zip(range(task.steps), screenshots(task)):
                if draw.random() < 0.1:
                    habit = random_habit(draw)
                history.append(question(draw, shot))
                sent = habit.trim(history)
                told = [ask(url, "tiny", sent, task, client) for url in self.urls]
                history.append({"role": "assistant", "content": told[0].text})
                with self._lock:
                    self.steps += 1
                    self.ahead += told[0].ahead
                    if told[0].text != told[1].text:
                        self.differing.append(f"agent {seed}, step {number}, {habit}")
                time.sleep(draw.choice((0, 0, 0.02, 0.1)))
        return task.steps


def compare(family: str, steps: int, seed: int) -> Compared:
    """Compare at least so many steps on one family."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_checkpoint(folder / "model", family)
        options = ("--dtype", "float32", "--served-model-name", "tiny")
        with (
            serving(model, folder, *options) as one,
            serving(model, folder, *options, "--tune", "prepare_next=false") as other,
            ThreadPoolExecutor(SIDE_BY_SIDE) as pool,
        ):
            compared = Compared(one, other)
            while compared.steps < steps:
                seeds = range(seed, seed + 2 * SIDE_BY_SIDE)
                seed += len(seeds)
                for _ in pool.map(compared.run, seeds):
                    pass
                print(f"{family}: {compared.steps} steps", flush=True)
            with httpx.Client() as client:
                for count, value in counters(one.url, client).items():
                    if count.startswith("saccade_prepared_tokens_total"):
                        print(f"{family}: {count} {value:.0f}")
    return compared


def main(words: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if any answer differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", nargs="+", default=list(FAMILIES))
    given = parser.parse_args(words)
    found = [
        compare(family, -(-given.steps // len(given.family)), given.seed) for family in given.family
    ]
    for line in (line for each in found for line in each.differing):
        print(line)
    differing = sum(len(each.differing) for each in found)
    ahead = sum(each.ahead for each in found)
    steps = sum(each.steps for each in found)
    print(f"{steps} steps, {ahead} prompt tokens used that were computed ahead, {differing} differ")
    return bool(differing)


if __name__ == "__main__":
    raise SystemExit(main())
