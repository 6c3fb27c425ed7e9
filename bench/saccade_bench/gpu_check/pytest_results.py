"""A plugin of pytest that writes what became of each test when it is known, so that a run which is
ended at any moment names what failed and what was under way: `-p` and this module.

A JSON line each, appended to the file that SACCADE_TEST_RESULTS names. `read_results` reads it.
Where SACCADE_TESTS names a file with a test in each line, these are run alone. Tests of families
that have never run on a GPU come first.
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
"""Families without a run on a GPU, which come first: their tests may find no time otherwise."""
MAX_SAID = 3000
"""Characters of the end of a failure's traceback."""


def _write(**line: object) -> None:
    if PLACE in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[PLACE]).open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep those that are named, or whose file is. A name that is no test's any more stops none.

    Families of `UNSEEN` come first.
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
    """Of a phase of a test: its own, or what came to no good before it or after it."""
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
    """What is known of a run. `outcomes`: how often each. `bad`: what was said of each test that
    failed. `broken`: those of them that met an error of the GPU. `unfinished`: those under way.
    """

    outcomes: dict[str, int] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)


def read_results(path: Path) -> Results:
    """Those of a run that may have been ended while it wrote."""
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
        if outcome in BAD:  # what the GPU said comes first, then that the process crashed
            bad.setdefault(test, entry.get("said", ""))
        if last.get(test) not in BAD:  # a teardown's line comes after a failure's
            last[test] = outcome
    unfinished = [test for test, outcome in last.items() if outcome == "started"]
    counted = [outcome for outcome in last.values() if outcome != "started"]
    outcomes = {each: counted.count(each) for each in dict.fromkeys(counted)}
    return Results(outcomes, bad, broken, unfinished)
