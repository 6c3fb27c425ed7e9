"""Cost of attacks by hostile clients: runs each against a fresh server, and prints a table.

    python -m saccade_bench.abuse --output abuse             # abuse.json and abuse.md
    python -m saccade_bench.abuse --only headers pipelined   # some of them, by name
    python -m saccade_bench.abuse --source OLD_CHECKOUT      # the same attacks on another version
    python -m saccade_bench.abuse --routed                   # on a router in front of the server

An attack is a function of a URL with the decorator `attack`, in one of `MODULES`. It returns a
short description of the outcome. It runs in a separate process, so that its work does not delay the
requests to /health here. Attacks only use the loopback interface, with bounded bytes and time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from saccade_bench.attacks.watch import Cost, watching

MODULES = (
    "saccade_bench.attacks.edge",
    "saccade_bench.attacks.sources",
    "saccade_bench.attacks.images",
    "saccade_bench.attacks.documents",
)
"""Modules that define attacks. Each may define any number of them."""
LONGEST = 260
"""Maximum duration of an attack."""
SETTLE = 1.0
"""Seconds for which the server is still watched after an attack has ended."""
KEY = "a-key"


@dataclass(frozen=True)
class Attack:
    """An attack. `options` are the server's. `key` is False if it works without the API key."""

    name: str
    run: Callable[[str], str]
    options: tuple[str, ...]
    key: bool


ATTACKS: dict[str, Attack] = {}


def attack(
    name: str, *options: str, key: bool = True
) -> Callable[[Callable[[str], str]], Callable[[str], str]]:
    """Register an attack, which receives the server's URL and returns a description of the outcome.

    With `key=False`, the server requires an API key, and the attack does not have it.
    """

    def add(run: Callable[[str], str]) -> Callable[[str], str]:
        given = options if key else ("--api-key", KEY, *options)
        ATTACKS[name] = Attack(name, run, given, key)
        return run

    return add


def load_attacks() -> None:
    """Import all modules that define attacks, which registers them in order."""
    for module in MODULES:
        importlib.import_module(module)


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    attack: str
    needs_key: bool
    outcome: str
    cost: Cost
    alive: bool
    tracebacks: int


@contextmanager
def running(source: Path, log: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a `saccade` command that listens on a free port. Yields its URL and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "saccade", *words, "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=source)
    try:
        wait_until_ready(url, process)
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(each: Attack, source: Path, folder: Path, routed: bool) -> Row:
    """Start a server, attack it (or a router in front of it), record the cost, and stop it."""
    log = folder / f"{each.name.replace(' ', '-')}.log"
    files = str(folder / "files")
    options = [option.replace("FILES", files) for option in each.options]
    few = ["--threads", "1", "--media-workers", "1"]
    few += [] if "--files-dir" in options else ["--files-dir", files]
    with ExitStack() as stack:
        served = running(source, log, "serve", "demo", *few, *options)
        url, process = stack.enter_context(served)
        if routed:
            url, process = stack.enter_context(running(source, log, "route", "--workers", url))
        with watching(process.pid, url) as cost:
            outcome = run_apart(each.name, url)
            time.sleep(SETTLE)
        alive = process.poll() is None
    text = log.read_text(errors="replace")
    return Row(each.name, each.key, outcome, cost, alive, text.count("Traceback (most recent"))


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def _attack(name: str, url: str, answer: multiprocessing.SimpleQueue[str]) -> None:
    load_attacks()
    try:
        answer.put(ATTACKS[name].run(url))
    except Exception as error:  # an attack that raises is a result, too
        answer.put(f"{type(error).__name__}: {error}"[:200])


def run_apart(name: str, url: str) -> str:
    """Run an attack in a separate process, and return its description of the outcome."""
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=_attack, args=(name, url, answer), daemon=True)
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
        return f"not over after {LONGEST} s"
    return answer.get() if not answer.empty() else f"the attacker ended with {process.exitcode}"


def markdown(rows: list[Row]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| attack | key | what came of it | CPU s: front / engine / decode | "
        "MB before -> peak: front, engine, decode | worst /health | of it the front's CPU | failed "
        "| tracebacks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    roles = ("front", "engine", "decode")
    for row in rows:
        cost = row.cost
        cpu = " / ".join(f"{cost.cpu.get(name, 0.0):.1f}" for name in roles)
        memory = ", ".join(
            f"{cost.memory_before.get(name, 0.0):.0f} -> {cost.memory.get(name, 0.0):.0f}"
            for name in roles
        )
        health = f"{cost.health * 1e3:.0f} ms of {cost.healths}"
        stretch = f"{cost.stretch * 1e3:.0f} ms"
        dead = "" if row.alive else " (server gone)"
        lines.append(
            f"| {row.attack} | {'yes' if row.needs_key else 'no'} | {row.outcome}{dead} | {cpu} | "
            f"{memory} | {health} | {stretch} | {cost.failures} | {row.tracebacks} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=[], help="words that names must contain")
    parser.add_argument("--source", type=Path, default=Path.cwd(), help="checkout to serve from")
    parser.add_argument("--routed", action="store_true", help="attack a router before the server")
    parser.add_argument("--output", type=Path, help="write FILE.json and FILE.md")
    options = parser.parse_args()
    load_attacks()
    chosen = [
        each
        for each in ATTACKS.values()
        if not options.only or any(word in each.name for word in options.only)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for each in chosen:
            rows.append(measure(each, options.source.resolve(), Path(folder), options.routed))
            print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    if options.output:
        options.output.with_suffix(".json").write_text(
            json.dumps([asdict(row) for row in rows], indent=1)
        )
        options.output.with_suffix(".md").write_text(markdown(rows))


if __name__ == "__main__":
    from saccade_bench.abuse import main as run  # so that attacks register in the imported module

    run()
