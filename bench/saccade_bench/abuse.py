"""What hostile clients cost: each attack against a fresh server, as a table.

    python -m saccade_bench.abuse --output abuse             # abuse.json and abuse.md
    python -m saccade_bench.abuse --only headers pipelined   # some of them, by name
    python -m saccade_bench.abuse --source OLD_CHECKOUT      # the same attacks on another version
    python -m saccade_bench.abuse --routed                   # on a router in front of the server

An attack is a function of a URL with the decorator `attack`, in one of the modules of `MODULES`; it
returns a few words on what became of it. It runs in a process of its own, so that its work does not
delay the probe of /health here. Loopback only; every attack is bounded in bytes and time.
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
"""Where attacks are defined; a module may hold any number of them."""
LONGEST = 260
"""Seconds that an attack may take."""
SETTLE = 1.0
"""Seconds of looking on after an attack has ended."""
KEY = "a-key"


@dataclass(frozen=True)
class Attack:
    """`options` start the server; `key`: whether the attacker needs the server's key."""

    name: str
    run: Callable[[str], str]
    options: tuple[str, ...]
    key: bool


ATTACKS: dict[str, Attack] = {}


def attack(
    name: str, *options: str, key: bool = True
) -> Callable[[Callable[[str], str]], Callable[[str], str]]:
    """Adds a row: the function gets the server's URL and returns the outcome.

    With `key=False` the server asks for a key that the attacker lacks.
    """

    def add(run: Callable[[str], str]) -> Callable[[str], str]:
        given = options if key else ("--api-key", KEY, *options)
        ATTACKS[name] = Attack(name, run, given, key)
        return run

    return add


def load_attacks() -> None:
    """All rows, in the order of the modules."""
    for module in MODULES:
        importlib.import_module(module)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    attack: str
    needs_key: bool
    outcome: str
    cost: Cost
    alive: bool
    tracebacks: int


@contextmanager
def running(source: Path, log: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A listening command: its URL and its process."""
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
    """Start a server, attack it (or the router in front), watch, stop it."""
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
    except Exception as error:  # an attack that fails is a result too
        answer.put(f"{type(error).__name__}: {error}"[:200])


def run_apart(name: str, url: str) -> str:
    """The attack's own words about its outcome."""
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
    """The table."""
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
    from saccade_bench.abuse import main as run  # one module, so that attacks find one registry

    run()
