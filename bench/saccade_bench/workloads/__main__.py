"""Run published workloads with repeated images against any OpenAI-compatible server.

    python -m saccade_bench.workloads growing-chat --base-url http://127.0.0.1:8000
    python -m saccade_bench.workloads window --published
    python -m saccade_bench.workloads all --peer vllm=http://127.0.0.1:8001 --pid 4711

WORKLOAD is window, identical, same-images, half-seen, growing-chat, trimming or all. Sizes are
small by default, for a CPU. `--published` uses the published ones, and options change single
values. Servers take turns, and each continues with its own answers. Prints for each turn the
computed prompt tokens (if usage has `cached_tokens`), encoded images (of a Saccade server), TTFT
and CPU time (of `--pid`), and how much each value grows with every repeated image.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import httpx
from rich.console import Console
from rich.table import Table

from saccade_bench.agents.habits import HABITS
from saccade_bench.agents.run import AgentTask
from saccade_bench.workloads.conversations import WORKLOADS, WorkloadSize, groups
from saccade_bench.workloads.published import PUBLISHED
from saccade_bench.workloads.replay import PeerServer, WorkloadRound, per_seen, replay

ROWS: dict[str, Callable[[WorkloadRound], float | None]] = {
    "tokens": lambda each: each.prompt,
    "computed": lambda each: each.computed,
    "encoded": lambda each: each.encoded,
    "TTFT ms": lambda each: each.ttft,
    "CPU ms": lambda each: each.cpu,
}
SEEN = ("computed", "TTFT ms", "CPU ms")
"""Values for which the cost of a repeated image is estimated."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workload", choices=[*WORKLOADS, "all"])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, help="the server's process, to measure its CPU time")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--published", action="store_true", help="use the published size")
    parser.add_argument("--users", type=int)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--counts", type=int, nargs="+", help="images in a request or window")
    parser.add_argument("--size", help="WIDTHxHEIGHT")
    parser.add_argument("--words", type=int, help="words of text")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--habits", nargs="+", choices=list(HABITS))
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between turns")
    parser.add_argument("--seed", type=int)
    given = parser.parse_args(words)
    seed = int(time.time()) if given.seed is None else given.seed
    peers = [peer.partition("=")[::2] for peer in given.peer]
    targets = [target("this", given.base_url, given.pid), *(target(*peer) for peer in peers)]
    console = Console(width=120)
    for name in WORKLOADS if given.workload == "all" else (given.workload,):
        size = size_of(name, given)
        show(console, name, size, targets, seed, given.pause)
    return 0


def size_of(name: str, given: argparse.Namespace) -> WorkloadSize:
    """Return a workload's size: the default or the published one, changed by the options."""
    size = PUBLISHED[name].size if given.published else WorkloadSize()
    if name == "window" and not given.published:
        size = replace(size, counts=(2, 5))
    if name == "trimming" and not given.published:
        size = replace(size, users=1, turns=14)
    said = {
        "users": given.users,
        "turns": given.turns,
        "counts": given.counts and tuple(given.counts),
        "resolution": given.size and tuple(map(int, given.size.split("x"))),
        "words": given.words,
        "max_tokens": given.max_tokens,
        "habits": given.habits and tuple(given.habits),
    }
    return replace(size, **{field: value for field, value in said.items() if value is not None})


def target(label: str, url: str, pid: int | None = None) -> PeerServer:
    """Return a server and the name of its first model."""
    url = url.removesuffix("/").removesuffix("/v1")
    models = httpx.get(f"{url}/v1/models", timeout=60).raise_for_status().json()
    return PeerServer(label, url, models["data"][0]["id"], pid)


def show(
    console: Console,
    name: str,
    size: WorkloadSize,
    targets: Sequence[PeerServer],
    seed: int,
    pause: float,
) -> None:
    """Run a workload, and print its results next to the published ones."""
    width, height = size.resolution
    console.print(f"\n{name}: {size.users} users at once, images of {width}x{height}")
    table = Table("", "server", "", "by turn", "a seen image adds")
    found: dict[str, list[WorkloadRound]] = {each.label: [] for each in targets}
    for number, group in enumerate(groups(name, size)):
        for each in targets:
            salt = f"{name} {seed} {group[0].partition(',')[0]}"
            task = AgentTask(size=size.resolution, max_tokens=size.max_tokens, salt=salt)
            # Each workload has new images, because servers may have cached the images of others.
            first = random.Random(f"{seed} {name} {number}").randrange(1 << 30)
            rounds = replay(each, group, size.users, first, task, pause)
            found[each.label] += rounds
            own = rounds if name in ("growing-chat", "trimming") else []
            for what, values in lines(rounds):
                table.add_row(group[0], each.label, what, values, added(own, what))
        table.add_section()
    if name not in ("growing-chat", "trimming"):
        for label, rounds in found.items():
            for what in SEEN:
                table.add_row("all", label, what, "", added(rounds, what))
    console.print(table)
    console.print(f"Published: {PUBLISHED[name].told}")


def lines(rounds: Sequence[WorkloadRound]) -> Iterator[tuple[str, str]]:
    """Yield each metric's name and its values by turn."""
    for what, read in ROWS.items():
        values = [read(each) for each in rounds]
        if any(value is not None for value in values):
            yield what, " ".join("-" if value is None else f"{value:.0f}" for value in values)


def added(rounds: Sequence[WorkloadRound], what: str) -> str:
    """Return how much a metric grows with each repeated image, or "" if unknown."""
    if what not in SEEN:
        return ""
    value = per_seen(rounds, [ROWS[what](each) for each in rounds])
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
