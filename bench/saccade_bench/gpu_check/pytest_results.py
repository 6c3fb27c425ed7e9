"""A pytest plugin (`-p`) that records the outcome of each test as soon as it is known, so that a
run that is stopped at any time reports which tests failed, and which were running.

Each outcome is a JSON line in the file SACCADE_TEST_RESULTS, which `read_results` reads. If
SACCADE_TESTS names a file with one test per line, only these are run. Tests of families that have
never run on a GPU come first.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = "saccade_bench.gpu_check.pytest_results"
PLACE = "SACCADE_TEST_RESULTS"
ALONE = "SACCADE_TESTS"
BAD = ("failed", "CUDA error")
UNSEEN = (
    *("step3_vl", "kimi_vl", "lfm2_vl", "minicpmv4_7", "minicpm_ocr", "qianfan_ocr", "dots_ocr"),
    *("glm_ocr", "hunyuan_vl", "paddleocr_vl", "gemma4_unified"),
)
"""Families that have not run on a GPU. They are first, because time may run out."""
MAX_SAID = 3000
"""Maximum characters of a failure's traceback, of which the end is kept."""


def _write(**line: object) -> None:
    if PLACE in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[PLACE]).open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Only keep tests that are named in SACCADE_TESTS, or whose file is. Unknown names are ignored.

    Families of `UNSEEN` are moved to the front.
    """
    items.sort(key=lambda each: not any(name in each.nodeid for name in UNSEEN))
    if not (path := os.environ.get(ALONE)):
        return
    names = {*Path(path).read_text().splitlines()}
    left = [each for each in items if not {each.nodeid, each.nodeid.split("::")[0]} & names]
    items[:] = [each for each in items if each not in left]
    config.hook.pytest_deselected(items=left)


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="started")


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of a test's call, or of a setup or teardown that did not pass."""
    if report.when != "call" and report.passed:
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    said = "" if outcome == "passed" else report.longreprtext[-MAX_SAID:]
    seconds = round(report.duration, 2)
    _write(test=report.nodeid, outcome=outcome, seconds=seconds, said=said)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(test=report.nodeid, outcome="failed", said=report.longreprtext[-MAX_SAID:])


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a run.

    outcomes: number of tests by outcome.
    bad: output of each failed test.
    broken: failed tests that met a CUDA error.
    unfinished: tests that were still running.
    """

    outcomes: dict[str, int] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)


def read_results(path: Path) -> Results:
    """Read the results of a run, which may have been stopped while writing."""
    last: dict[str, str] = {}
    bad: dict[str, str] = {}
    broken: list[str] = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        test, outcome = entry["test"], entry["outcome"]
        if outcome == "CUDA error":
            broken.append(test)
        if outcome in BAD:  # keep the CUDA error, which precedes the process's crash
            bad.setdefault(test, entry.get("said", ""))
        if last.get(test) not in BAD:  # a teardown may be recorded after a failure
            last[test] = outcome
    unfinished = [test for test, outcome in last.items() if outcome == "started"]
    counted = [outcome for outcome in last.values() if outcome != "started"]
    outcomes = {each: counted.count(each) for each in dict.fromkeys(counted)}
    return Results(outcomes, bad, broken, unfinished)
