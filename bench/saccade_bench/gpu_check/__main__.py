"""Run everything that needs a GPU, on a CUDA machine without a network or an installation, in three
commands. `plan.py` prints them, with the files to carry.

    make gpu-check-a PYTHON=python3 ARGS="--out bench/results/h200"    (and -b, -c)
    (or: PYTHONPATH=.:bench python3 -m saccade_bench.gpu_check --command a --out bench/results/h200)

`make gpu-check` runs all stages of `stages.py`, the most valuable first. Each is a separate process
that is stopped at its time limit. All together end within --budget seconds, and stages for which no
time is left are reported as skipped. DIR gets report.md (each figure with its floor, published
results of other servers, the target, and advice if it is far off), summary.json, and results.tar.gz
with these, all logs and the stages' own files. These three are replaced atomically after each stage
and every five seconds, so that they are readable whenever the run is killed. Figures are also
printed, and `report.py` creates a report from the recovered files.
Exit status: 0 if everything succeeded, 1 if a stage failed, 2 if the check cannot run here.

`--device cpu --quick` tries out everything on tiny models, with kernels in Triton's interpreter.
Its figures are meaningless.

Only imports the standard library and this package, so that a missing package, a hang or a crash
only affects a stage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade_bench.gpu_check.archive import Archive
from saccade_bench.gpu_check.figures import Figure, printed
from saccade_bench.gpu_check.machine import explain, hardware, keep_line, versions
from saccade_bench.gpu_check.plan import unpack
from saccade_bench.gpu_check.report import COMMAND, failed, write_report
from saccade_bench.gpu_check.run import Outcome, StageRunner
from saccade_bench.gpu_check.stages import AGAIN, COMMANDS, FACTS, STAGES, Stage, most_seconds
from saccade_bench.gpu_check.targets import COPY, PRODUCTS

MAX_AGAIN = 100
"""Maximum number of tests that are run again."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m saccade_bench.gpu_check",
        description="GPU tests and benchmarks in one command, within a time budget.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder for results (%(default)s)"
    )
    parser.add_argument("--budget", type=float, help="seconds for everything")
    parser.add_argument("--limit", type=float, help="seconds of any stage, instead of its own")
    parser.add_argument(
        "--command", choices=tuple(COMMANDS), help="the stages of one of the commands (all)"
    )
    parser.add_argument(
        "--after",
        type=Path,
        help="summary.json of the command before: what failed runs again, first, and floors go by "
        "its speeds (a file that is not there: as if nothing had failed)",
    )
    parser.add_argument("--wheels", type=Path, help="folder of packages that this machine lacks")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script out"
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, few repeats")
    names = tuple(stage.name for stage in STAGES)
    parser.add_argument("--only", nargs="+", choices=names, help="stages to run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    command = COMMANDS[args.command] if args.command else None
    chosen = command.stages if command else STAGES
    stages = tuple(stage for stage in chosen if not args.only or stage.name in args.only)
    before = read_summary(args.after)
    with tempfile.TemporaryDirectory(prefix="saccade-check-") as name:
        folder, site = Path(name) / "results", Path(name) / "site"
        folder.mkdir()
        if args.wheels:
            for spoilt in unpack(args.wheels, site):
                print(f"cannot be unpacked: {spoilt}", flush=True)
            sys.path.insert(0, str(site))
            importlib.invalidate_caches()
        if tests := failed_before(before):
            path = Path(name) / "again.txt"
            path.write_text("\n".join(tests))
            stages = (replace(AGAIN, options=("--tests", str(path))), *stages)
        budget = args.budget or (command.budget if command else most_seconds(stages))
        runner = StageRunner(
            folder,
            device=args.device,
            quick=args.quick,
            budget=budget,
            limit=args.limit,
            site=site if args.wheels else None,
            known=[Figure(metric, value, "") for metric, value in speeds_before(before).items()],
        )
        facts = {
            "command": shown(args, sys.argv[1:] if arguments is None else arguments),
            "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "quick": args.quick,
            "hardware": hardware(),
            "versions": versions(args.wheels),
            "speeds": speeds_before(before),
        }
        return carry_out(runner, stages, args.out.resolve(), facts, args.device)


def shown(args: argparse.Namespace, given: Sequence[str]) -> str:
    """Return the command without this machine's output path."""
    argv = ["OUT" if each == str(args.out) else each for each in given]
    return shlex.join(["python", "-m", "saccade_bench.gpu_check", *argv])


def carry_out(
    runner: StageRunner, stages: Sequence[Stage], out: Path, facts: dict[str, Any], device: str
) -> int:
    """Run all stages, print each outcome after archiving it, and return the exit status."""
    absent = {stage.name: lacks for stage in stages if (lacks := runner.lacks(stage))}
    if absent:
        print(explain(absent), flush=True)
    if len(absent) == len(stages):
        print("cannot run: every stage lacks packages")
        return 2
    card = facts["hardware"].get("gpu") or facts["hardware"].get("cpu") or "?"
    (runner.out / COMMAND).write_text(json.dumps(facts | {"not installed": absent}) + "\n")
    with Archive(runner.out, out, write_report) as archive:
        for stage in stages:
            print(f"== {stage.name}, on {card}: {stage.about}", flush=True)
            outcome = runner.run(stage)
            archive.write()
            tell(outcome)
            if outcome.name == FACTS.name and device == "cuda" and not sees_cuda(runner.out):
                print("cannot run: torch sees no CUDA device (--device cpu --quick tries it out)")
                return 2
    bad = [each for each in runner.outcomes if failed(each)]
    well = sum(each.status == "ok" for each in runner.outcomes)
    skipped = len(runner.outcomes) - well - len(bad)
    print(f"{out / 'report.md'}: {well} stages ok, {len(bad)} failed, {skipped} skipped")
    if device == "cuda":
        print("Before anything is mended, commit all of it:")
        print(f"  {keep_line(str(out), facts['hardware'].get('gpu', ''))}")
    return 1 if bad else 0


def tell(outcome: Outcome) -> None:
    """Print the outcome of a stage."""
    for figure in outcome.figures:
        print(printed(outcome.name, figure))
    for figure in outcome.figures:
        if figure.error:
            print(f"   ! {figure.metric}: {figure.error}")
    took = f"after {outcome.seconds:.0f} s " if outcome.seconds else ""
    print(f"   {outcome.name}: {outcome.status} {took}{outcome.why}", flush=True)


def sees_cuda(folder: Path) -> bool:
    """Return False if torch reported that it has no CUDA device."""
    path = folder / "facts.json"
    return not path.is_file() or bool(json.loads(path.read_text()).get("cuda", True))


# ---- the command before
# ---- results of the previous command


def read_summary(path: Path | None) -> dict[str, Any]:
    """Return a summary, or an empty dict if the file is absent or invalid."""
    try:
        found: dict[str, Any] = json.loads(path.read_text()) if path else {}
    except (OSError, json.JSONDecodeError) as error:
        print(f"--after {path}: not read ({error}): as if nothing had failed", flush=True)
        return {}
    return found


def failed_before(summary: dict[str, Any]) -> list[str]:
    """Return the tests that failed, or that were running when the run was stopped."""
    tests = summary.get("tests", {})
    return [*tests.get("bad", ()), *tests.get("unfinished", ())][:MAX_AGAIN]


def speeds_before(summary: dict[str, Any]) -> dict[str, float]:
    """Return the speeds that were measured on this machine."""
    figures = [each for stage in summary.get("stages", ()) for each in stage["figures"]]
    return {
        each["metric"]: each["value"]
        for each in figures
        if each["metric"] in (COPY, PRODUCTS) and each["value"]
    }


if __name__ == "__main__":
    sys.exit(main())
