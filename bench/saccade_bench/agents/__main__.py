"""Measure agents that trim their history, against any OpenAI-compatible server.

    python -m saccade_bench.agents --base-url http://127.0.0.1:8000 [--model NAME]
        [--habits append keep-1 keep-3 keep-5 fours vanish window] [--steps 14] [--size 640x360]
        [--pause 2] [--tasks 2]

Each trimming strategy (habit) has its own `cache_salt`, and runs its tasks one after another.
`--pause` is the delay between an answer and the next screenshot, which simulates an agent's action.
With a Saccade server, it also waits until all precomputed parts of the next prompt are done. Prints
for each task the prompt tokens computed per step from the fourth step on, and how many precomputed
tokens were used or wasted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import httpx
from rich.console import Console
from rich.table import Table

from saccade_bench.agents.habits import HABITS
from saccade_bench.agents.run import AgentStep, AgentTask, act, counters, mean

FIRST = 3
"""Index of the fourth step."""
WAITING = "saccade_next_prompts_waiting"
ENCODED = "saccade_images_encoded_total"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="")
    parser.add_argument("--habits", nargs="+", choices=list(HABITS), default=list(HABITS))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--size", default="640x360")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--tasks", type=int, default=2)
    given = parser.parse_args(words)
    width, height = map(int, given.size.split("x"))
    url, run = given.base_url.removesuffix("/v1"), f"{time.time():.0f}"
    table = Table(
        "habit", "task", "computed a step", "ready a step", "in vain", "encoded", "TTFT ms"
    )
    with httpx.Client(timeout=600) as client:
        model = given.model or client.get(f"{url}/v1/models").json()["data"][0]["id"]

        def rest() -> None:
            time.sleep(given.pause)
            while counters(url, client).get(WAITING):
                time.sleep(0.02)

        for habit in given.habits:
            for seed in range(given.tasks):
                task = AgentTask(given.steps, (width, height), seed=seed, salt=f"{habit} {run}")
                before = counters(url, client).get(ENCODED, 0.0)
                steps = act(url, model, HABITS[habit], task, rest, client)
                encoded = counters(url, client).get(ENCODED, 0.0) - before
                table.add_row(habit, str(seed + 1), *row(steps, encoded))
    Console(width=100).print(table)
    return 0


def row(steps: Sequence[AgentStep], encoded: float) -> list[str]:
    """Return a task's results, from the fourth step on, as cells of the table."""
    late = steps[FIRST:]
    vain, used = sum(step.vain for step in steps), sum(step.ahead for step in steps)
    return [
        f"{mean([step.computed for step in late]):.0f}",
        f"{mean([step.ahead for step in late]):.0f}",
        f"{vain} ({100 * vain / max(1, vain + used):.0f} %)",
        f"{encoded:.0f}",
        f"{1e3 * mean([step.ttft for step in late]):.0f}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
