"""Everything that needs a GPU, on a CUDA machine without network and without an installation, in
three commands of less than ten minutes each:

    make gpu-check-1 PYTHON=python3 ARGS="--out bench/results/h200"    (and -2, and -3)
    (or: PYTHONPATH=.:bench python3 -m saccade_bench.gpu_check --command 1 --out bench/results/h200)

`make gpu-check` is all three, one after another. What such a machine lacks of packages,
`python -m saccade_bench.gpu_check.wheels` downloads where there is a network.

Runs the stages of `stages.py`, each in a process of its own, the most valuable first; all together
end within --budget seconds, and what found no time is reported as skipped. DIR has report.md (each
figure with its floor, what others have published, the target, and what to try where it is far off),
summary.json, and results.tar.gz with these and the stages' own files; all three are replaced after
each stage and every 15 seconds, each as a whole, so that a kill at any moment leaves them readable.
Status: 0 all went well, 1 a stage failed, 2 it cannot run here.

`--device cpu --quick` exercises all of it on tiny models, kernels in Triton's interpreter; the
figures mean nothing then.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from saccade_bench.gpu_check.archive import Archive
from saccade_bench.gpu_check.machine import explain, hardware, missing, versions
from saccade_bench.gpu_check.report import failed, write_report
from saccade_bench.gpu_check.run import StageRunner, said
from saccade_bench.gpu_check.stages import (
    COMMAND_SECONDS,
    COMMANDS,
    STAGES,
    Stage,
    most_seconds,
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m saccade_bench.gpu_check",
        description="GPU tests and benchmarks in one command, within a time budget.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder for results (%(default)s)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds for everything (570 for a command, or as long as its stages may take)",
    )
    parser.add_argument(
        "--command",
        type=int,
        choices=range(1, len(COMMANDS) + 1),
        help="the stages of one of the three commands (all of them)",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script out"
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, few repeats")
    names = tuple(stage.name for stage in STAGES)
    parser.add_argument("--only", nargs="+", choices=names, help="stages to run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if missing(("torch",)):
        print("cannot run: torch is not installed for this Python")
        return 2
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "cannot run: torch sees no CUDA device (--device cpu --quick tries this script out "
            "on tiny models)"
        )
        return 2
    chosen = COMMANDS[args.command - 1] if args.command else STAGES
    stages = tuple(stage for stage in chosen if not args.only or stage.name in args.only)
    budget = args.budget or (COMMAND_SECONDS if args.command else most_seconds(stages))
    with tempfile.TemporaryDirectory(prefix="saccade-check-") as name:
        runner = StageRunner(Path(name), device=args.device, quick=args.quick, budget=budget)
        return carry_out(runner, stages, args, sys.argv[1:] if arguments is None else arguments)


def carry_out(
    runner: StageRunner, stages: Sequence[Stage], args: argparse.Namespace, given: Sequence[str]
) -> int:
    """All stages, each told of when it is in the archive; the status."""
    out: Path = args.out.resolve()
    absent = {stage.name: lacks for stage in stages if (lacks := runner.lacks(stage))}
    if absent:
        print(explain(absent), flush=True)
    if len(absent) == len(stages):
        print("cannot run: every stage lacks packages")
        return 2
    argv = ["OUT" if each == str(args.out) else each for each in given]
    facts = {
        "command": shlex.join(["python", "-m", "saccade_bench.gpu_check", *argv]),
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "quick": args.quick,
        "hardware": hardware(),
        "versions": versions(),
        "not installed": absent,
    }
    with Archive(runner.out, out) as archive:
        for stage in stages:
            outcome = runner.run(stage)
            write_report(runner.out, facts | {"seconds": round(runner.used, 1)}, runner.outcomes)
            archive.write()
            print(said(outcome), flush=True)
    bad = [each for each in runner.outcomes if failed(each)]
    well = sum(each.status == "ok" for each in runner.outcomes)
    skipped = len(runner.outcomes) - well - len(bad)
    print(f"{out / 'report.md'}: {well} stages ok, {len(bad)} failed, {skipped} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
