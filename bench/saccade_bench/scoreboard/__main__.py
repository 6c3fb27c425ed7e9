"""Write rows of the scoreboard, and its page.

    python -m saccade_bench.scoreboard run ENGINE --home FOLDER [--images 40] [--runs 1]
    python -m saccade_bench.scoreboard page [--rows FOLDER] [--output FILE]

`run` installs the engine in an environment in --home, converts the demo model, starts the engine
with and without caches, runs `prove`, and sends the requests of each mix-up to a fresh server.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from saccade.ipc.own_server import free_port
from saccade_bench.prove.cases import CASES
from saccade_bench.prove.client import refusal
from saccade_bench.prove.options import ProveOptions
from saccade_bench.prove.run import Proof, ProvedServer, prove
from saccade_bench.scoreboard.engines import ENGINES, ScoredEngine
from saccade_bench.scoreboard.rows import (
    UNJUDGED,
    ScoredCase,
    ScoredRow,
    combined,
    page,
    read_row,
)
from saccade_bench.started import Side, running

DOCS = Path(__file__).parents[3] / "docs"
ANSWER_SECONDS = 120.0
START_SECONDS = 900.0


def run(
    engine: ScoredEngine, home: Path, images: int, names: tuple[str, ...], runs: int = 1
) -> ScoredRow:
    """Return an engine's row. Each run has new servers, and images that no run before it had."""
    home.mkdir(parents=True, exist_ok=True)
    python, model = engine.python(home), engine.make(home)
    seeds = tuple(random.SystemRandom().getrandbits(32) for _ in range(runs))
    asked = names or tuple(case.name for case in CASES if case.name not in engine.absent)
    found: list[dict[str, ScoredCase]] = []
    for seed in seeds:
        with ExitStack() as stack:
            warm, cold = (
                Side(engine.name, _filled(command, python, model, stack))
                for command in (engine.serve, engine.cold)
            )
            found.append(_one_run(warm, cold, home, ProveOptions(asked, images, seed=seed)))
    command = f"python -m saccade_bench.scoreboard run {engine.name} --home ENVIRONMENTS "
    command += f"--images {images} --runs {runs}"
    if names:
        command += f" --cases {' '.join(names)}"
    date = datetime.now(UTC).date().isoformat()
    cases = {name: ScoredCase(UNJUDGED, why) for name, why in engine.absent.items()}
    cases |= {name: combined([each[name] for each in found]) for name in asked}
    return ScoredRow(engine.name, engine.version(home), date, command, seeds, cases)


def _filled(command: str, python: Path, model: Path, stack: ExitStack) -> str:
    scratch = stack.enter_context(TemporaryDirectory()) if "{scratch}" in command else ""
    values = {"{python}": str(python), "{model}": str(model), "{scratch}": scratch}
    for name, value in values.items():
        command = command.replace(name, value)
    return command


def _one_run(warm: Side, cold: Side, logs: Path, options: ProveOptions) -> dict[str, ScoredCase]:
    port = free_port()
    with ExitStack() as stack, running(cold, logs, START_SECONDS) as beside:

        def start() -> None:
            stack.close()
            stack.enter_context(running(warm, logs, START_SECONDS, port))

        start()
        server = ProvedServer(f"http://127.0.0.1:{port}", timeout=ANSWER_SECONDS)
        proof = prove(server, replace(options, cold_url=beside.url), start)
    cases = {}
    for name, finding in proof.findings.items():
        compared, found = proof.cold[name], suspects(proof, name)
        requests = repeated(warm, logs, found) if found else ()
        cases[name] = ScoredCase(
            finding.verdict,
            finding.why,
            (compared.own, compared.others, compared.undecided),
            bool(requests),
            requests or found,
        )
    return cases


def suspects(proof: Proof, name: str) -> tuple[dict[str, Any], ...]:
    """Return the requests that may repeat a mix-up, as few as are known to suffice."""
    if found := proof.cold[name].requests:
        return found
    return tuple(proof.requests.get(name, ()))


def repeated(
    side: Side, logs: Path, requests: tuple[dict[str, Any], ...]
) -> tuple[dict[str, Any], ...]:
    """Return one earlier request, or all, and the last one, if a fresh server answers the last one
    otherwise than by itself. Returns () if it does not.
    """
    *before, last = requests
    alone = _last_answer(side, logs, [last])
    for few in (*([each] for each in reversed(before) if each != last), before):
        if _last_answer(side, logs, [*few, last]) != alone:
            return (*few, last)
    return ()


def _last_answer(side: Side, logs: Path, bodies: list[dict[str, Any]]) -> str:
    with running(side, logs, START_SECONDS) as server:
        return [_answer(server.url, body) for body in bodies][-1]


def _answer(url: str, body: dict[str, Any]) -> str:
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ANSWER_SECONDS)
    if reply.is_error:
        return refusal(reply.status_code, reply.text)
    return str(reply.json()["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("engine", choices=[each.name for each in ENGINES])
    runs.add_argument("--home", type=Path, required=True, help="where environments are made")
    runs.add_argument("--images", type=int, default=40, help='images in the case "many"')
    runs.add_argument("--runs", type=int, default=1, help="each with other images")
    runs.add_argument("--cases", nargs="*", default=(), help="default: all")
    pages = commands.add_parser("page")
    pages.add_argument("--output", type=Path, default=DOCS / "scoreboard.md")
    for each in (runs, pages):
        each.add_argument("--rows", type=Path, default=DOCS / "scoreboard")
    args = parser.parse_args()
    if args.command == "run":
        engine = next(each for each in ENGINES if each.name == args.engine)
        row = run(engine, args.home, args.images, tuple(args.cases), args.runs)
        print(row.write(args.rows))
        sys.exit(any(each.wrong for each in row.cases.values()))
    args.output.write_text(page([read_row(path) for path in sorted(args.rows.glob("*.json"))]))


if __name__ == "__main__":
    main()
