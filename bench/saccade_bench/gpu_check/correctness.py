"""Stage `correctness`: run all tests of kernels, and of the engine on a device, in one parallel
pytest run, without float32 cases that would only compile slowly.

A test process that encounters a CUDA error exits and is replaced (`conftest.py`). With --tests,
only the tests listed in a file are run, and compute-sanitizer checks the first one with a CUDA
error.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from saccade_bench.gpu_check import pytest_results
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.gpu_check.machine import ROOT
from saccade_bench.gpu_check.pytest_results import Results, read_results
from saccade_bench.gpu_check.tied import tied

KERNELS = (
    *("engine_parity", "paged", "layer", "sample", "segments", "fp8", "rotary", "delta"),
    *("scaled", "int4", "experts", "edits", "sample_rules", "low_rank"),
)
"""Files in tests/kernels that use a GPU if there is one."""
ENGINE = ("engine", "encoder", "kernels")
"""Files in tests/gpu."""
PATHS = (
    *(f"tests/gpu/test_{name}.py" for name in ENGINE),
    *(f"tests/kernels/test_{name}.py" for name in KERNELS),
)
QUICK = ("tests/kernels/test_fp8.py", "tests/gpu/test_encoder.py")
RESULTS = "tests.jsonl"
MAX_ABREAST = 14
WRITE_SECONDS = 6.0
"""Time reserved at the end of the stage for pytest to exit in order."""
NAMED = 12
"""Maximum number of failures listed by name."""
FAILED = "tests failed"
"""The metric."""


def abreast(*, quick: bool) -> int:
    """Return the number of test processes, or 0 without pytest-xdist, to run tests in pytest."""
    if not find_spec("xdist"):
        return 0
    return 2 if quick else max(2, min(MAX_ABREAST, len(os.sched_getaffinity(0)) - 2))


def pytest_words(tests: Sequence[str], processes: int) -> list[str]:
    options = ["-vv", "--tb=short", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
    options += ["-p", "no:randomly", "-p", pytest_results.NAME, "-m", "not slow or gpu"]
    if processes:
        # Without work stealing, because stealing from a crashed process ends the whole run.
        options += ["-n", str(processes), "--dist", "load"]
    return [*options, *tests]


def environment(results: Path) -> dict[str, str]:
    # PYTEST_XDIST_WORKER is set if this stage is itself run by a test
    ours = {name: each for name, each in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    return ours | {
        "OMP_NUM_THREADS": "1",
        "SACCADE_HALVES": "1",
        pytest_results.PLACE: str(results),
    }


def files_of(tests: Iterable[str]) -> tuple[str, ...]:
    """Return the files of tests that exist."""
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    return tuple(file for file in files if (ROOT / file).is_file())


def run(tests: Sequence[str], results: Path, until: float, processes: int) -> bool:
    """Run tests. Return True if they finished before `until`.

    All processes are in the session of this stage, so that they end with it.
    """
    command = tied("pytest", *pytest_words(tests, processes))
    process = subprocess.Popen(command, cwd=ROOT, env=environment(results))
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.1, until - time.monotonic()))
        return True
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(WRITE_SECONDS)
    process.kill()
    return False


def tell(found: Results, file: FigureFile, *, done: bool, cuda: bool) -> None:
    """Add a figure with the outcome. If `cuda`, it is a failure if no test ran, because there is a
    GPU.
    """
    ran = sum(n for outcome, n in found.outcomes.items() if outcome != "skipped")
    note = ", ".join(f"{n} {outcome}" for outcome, n in sorted(found.outcomes.items()))
    if not done:
        note += f"; then the time was over, with {len(found.unfinished)} under way"
    for test, said in list(found.bad.items())[:NAMED]:
        note += f"; {test.removeprefix('tests/')}: {first_words(said)}"
    if len(found.bad) > NAMED:
        note += f" and {len(found.bad) - NAMED} more"
    if not ran and (cuda or not found.outcomes):
        file.failures += 1
        file.add(Figure(FAILED, None, "tests", error=f"no test ran: {note}"))
        return
    file.failures += bool(found.bad) or not done
    file.add(Figure(FAILED, len(found.bad), "tests", note=note))


def first_words(said: str) -> str:
    """Return the error of a traceback: the first line marked by pytest, or else the first line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [""]
    marked = (line[1:].strip() for line in lines if line.startswith("E "))
    return next(marked, lines[0])[:100]


def check_memory(test: str, seconds: float) -> None:
    """Run a test that met a CUDA error with compute-sanitizer, which prints its findings."""
    if not (sanitizer := shutil.which("compute-sanitizer")) or seconds < 5:
        print(f"compute-sanitizer did not look at {test}: not there, or no time", flush=True)
        return
    command = [sanitizer, "--tool", "memcheck", "--target-processes", "all"]
    command += [sys.executable, "-m", "pytest", *pytest_words([test], 0)]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, timeout=seconds, check=False)


def main() -> int:
    args = stage_arguments(__doc__)
    file, results = FigureFile(args.figures), args.figures.resolve().with_name(RESULTS)
    until = time.monotonic() + args.seconds - WRITE_SECONDS
    paths = QUICK if args.quick else PATHS
    if args.tests:
        os.environ[pytest_results.ALONE] = str(args.tests)
        paths = files_of(args.tests.read_text().splitlines())
    results.unlink(missing_ok=True)
    done = run(paths, results, until, abreast(quick=args.quick))
    found = read_results(results)
    tell(found, file, done=done, cuda=args.device == "cuda")
    if args.tests and found.broken:
        check_memory(found.broken[0], until - time.monotonic())
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
