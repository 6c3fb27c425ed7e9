"""Measure how long a client waits next to agents with another API key: steps of the engine and
prompt tokens computed for all clients between its question and its answer, and milliseconds.

    python -m saccade_bench.agents.beside [--agents 16] [--questions 12] [--habit keep-3]
        [--options ...]

Serves the demo model with two keys. Agents of one key trim their history. A client of the other key
asks about new images and texts, first alone and then concurrently with the agents.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from saccade_bench.agents.habits import HABITS
from saccade_bench.agents.run import AgentTask, act, counters
from saccade_bench.fixtures.server import serving
from saccade_bench.soak import drawn

KEYS = {"alice": "key-of-alice-1", "mallory": "key-of-mallory-1"}
PAUSE = 0.2
"""Duration of an agent's action."""


class Over(Exception):
    """Raised in agents to stop them."""


@dataclass(frozen=True)
class Wait:
    """What happened between a question and its answer."""

    steps: float
    computed: float
    seconds: float


def ask(url: str, client: httpx.Client, content: Any) -> Wait:
    """Request an answer of one token, and measure the wait."""
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    before, begun = counters(url, client), time.monotonic()
    client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
    seconds, after = time.monotonic() - begun, counters(url, client)

    def gone(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    computed = gone("saccade_prompt_tokens_total") - gone("saccade_cached_tokens_total")
    return Wait(gone("saccade_steps_total"), computed, seconds)


def ask_all(url: str, client: httpx.Client, count: int, first: int) -> dict[str, list[Wait]]:
    """Ask about `count` new images and texts."""
    waits: dict[str, list[Wait]] = {"picture": [], "text": []}
    for seed in range(first, first + count):
        shown = drawn.about(drawn.part(drawn.image_url(3 * seed, (64, 48))))
        waits["picture"].append(ask(url, client, shown))
        waits["text"].append(ask(url, client, drawn.text(seed)))
    return waits


def work(url: str, client: httpx.Client, habit: str, seed: int, over: Event) -> None:
    """Run an agent's tasks, one after another, until `over` is set."""

    def rest() -> None:
        if over.wait(PAUSE):
            raise Over

    try:
        for task in range(1000):
            agent = AgentTask(12, (160, 96), 4, seed=1000 * seed + task)
            act(url, "demo", HABITS[habit], agent, rest, client)
    except Over:
        return


def work_all(url: str, key: str, habit: str, count: int, over: Event) -> None:
    """Run `count` agents concurrently until `over` is set."""
    with httpx.Client(headers=bearer(key), timeout=300) as client:
        agents = [
            threading.Thread(target=work, args=(url, client, habit, seed, over))
            for seed in range(count)
        ]
        for each in agents:
            each.start()
        for each in agents:
            each.join()


def bearer(key: str) -> dict[str, str]:
    """Return the headers of a request with an API key."""
    return {"Authorization": f"Bearer {key}"}


def row(name: str, waits: Sequence[Wait]) -> list[str]:
    """Return a row of the table, with median and maximum of each value."""
    figures: list[tuple[Callable[[Wait], float], str]] = [
        (lambda each: each.steps, "{:.0f}"),
        (lambda each: each.computed, "{:.0f}"),
        (lambda each: 1e3 * each.seconds, "{:.0f}"),
    ]
    found = [(form, [pick(each) for each in waits]) for pick, form in figures]
    return [
        name,
        *(
            f"{form.format(statistics.median(all))} / {form.format(max(all))}"
            for form, all in found
        ),
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--habit", choices=list(HABITS), default="keep-3")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="server options")
    given = parser.parse_args(words)
    table = Table("median / maximum", "steps", "prompt tokens computed", "ms")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "keys").write_text("".join(f"{who}:{key}\n" for who, key in KEYS.items()))
        keys = ("--api-keys-file", str(folder / "keys"), "--max-total-tokens", "32768")
        with serving("demo", folder, *keys, *given.options) as server:
            alice = httpx.Client(headers=bearer(KEYS["alice"]), timeout=300)
            ask_all(server.url, alice, 2, 0)
            alone = ask_all(server.url, alice, given.questions, 100)
            # Another process, because threads of this one would delay the client that is measured.
            spawn = multiprocessing.get_context("spawn")
            over = spawn.Event()
            agents = spawn.Process(
                target=work_all,
                args=(server.url, KEYS["mallory"], given.habit, given.agents, over),
            )
            agents.start()
            time.sleep(5)
            beside = ask_all(server.url, alice, given.questions, 200)
            over.set()
            agents.join()
    for kind in alone:
        table.add_row(*row(f"{kind}, alone", alone[kind]))
        table.add_row(*row(f"{kind}, beside {given.agents} agents", beside[kind]))
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
