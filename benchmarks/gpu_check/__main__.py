"""Everything that needs a GPU, in one command, on a CUDA machine without network and without an
installation:

    make gpu-check PYTHON=python3 ARGS="--out benchmarks/results/h200"
    (or: PYTHONPATH=. python3 -m benchmarks.gpu_check --out benchmarks/results/h200)

Runs the stages of `stages.py`, each in a process of its own, the most valuable first; all together
end within --budget seconds, and what found no time is reported as skipped. Writes DIR/summary.json
and DIR/report.md after each stage, beside the stages' own files: each figure with its floor, what
others have published, the target, and what to try where it is far off. Status: 0 all went well, 1
a stage failed, 2 it cannot run here.

`--device cpu --quick` exercises all of it on tiny models, kernels in Triton's interpreter; the
figures mean nothing then.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.machine import explain, hardware, missing, versions
from benchmarks.gpu_check.report import failed, write_report
from benchmarks.gpu_check.run import StageRunner
from benchmarks.gpu_check.stages import STAGES


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="GPU tests and benchmarks in one command, within a time budget.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder for results (%(default)s)"
    )
    parser.add_argument(
        "--budget", type=float, default=525.0, help="seconds for everything (%(default)s)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script out"
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, few repeats")
    names = tuple(stage.name for stage in STAGES)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="stages to run")
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
    stages = [stage for stage in STAGES if stage.name in args.only]
    out: Path = args.out.resolve()
    runner = StageRunner(out, device=args.device, quick=args.quick, budget=args.budget)
    absent = {stage.name: lacks for stage in stages if (lacks := runner.lacks(stage))}
    if absent:
        print(explain(absent), flush=True)
    if len(absent) == len(stages):
        print("cannot run: every stage lacks packages")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if arguments is None else arguments
    argv = ["OUT" if each == str(args.out) else each for each in given]
    facts = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu_check", *argv]),
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "quick": args.quick,
        "hardware": hardware(),
        "versions": versions(),
        "not installed": absent,
    }
    for stage in stages:
        runner.run(stage)
        write_report(out, facts | {"seconds": round(runner.used, 1)}, runner.outcomes)
    bad = [each for each in runner.outcomes if failed(each)]
    well = sum(each.status == "ok" for each in runner.outcomes)
    skipped = len(runner.outcomes) - well - len(bad)
    print(f"{out / 'report.md'}: {well} stages ok, {len(bad)} failed, {skipped} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
