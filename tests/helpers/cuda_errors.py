"""A GPU's error ends the process that met it: every later test of that process would fail too.

Of pytest-xdist's processes alone, which are replaced. The test is named as one that crashed, and
the error stands in the file that SACCADE_TEST_RESULTS names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

MARKS = ("CUDA error", "Error [CUDA]")
"""How errors of torch, of the libraries that it calls, and of Triton begin."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    said = str(call.excinfo.value) if call.excinfo else ""
    if "PYTEST_XDIST_WORKER" in os.environ and any(mark in said for mark in MARKS):
        if results := os.environ.get("SACCADE_TEST_RESULTS"):
            line = {"test": item.nodeid, "outcome": "CUDA error", "said": said[:2000]}
            with Path(results).open("a") as file:
                file.write(f"{json.dumps(line)}\n")
        os._exit(70)
    return report
