"""Run stages one after another within a time budget. A failed stage does not affect the next.

Only imports the standard library and this package.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from saccade_bench.gpu_check.figures import Figure, read_figures
from saccade_bench.gpu_check.machine import PATHS, ROOT, missing
from saccade_bench.gpu_check.stages import END_SECONDS, Stage
from saccade_bench.gpu_check.targets import COPY, PRODUCTS
from saccade_bench.gpu_check.tied import tied

MAX_TAIL = 2000
"""Maximum characters of a stage's output in the summary."""
SPARE_SECONDS = 5.0
"""How long before it is stopped a stage is asked to be finished."""
REPORT_SECONDS = 3.0
"""Part of the budget that is reserved for the report."""
PACKAGE = "saccade_bench.gpu_check"
ALLOCATION = "expandable_segments:True"
"""GPU memory allocator settings, as in a server."""
OUTCOMES = "outcomes.jsonl"
"""File with one line for each finished stage."""


@dataclass
class Outcome:
    """The outcome of a stage."""

    name: str
    command: str
    status: Literal["ok", "failed", "timed out", "skipped", "cut off"] = "skipped"
    seconds: float = 0.0
    why: str = ""
    tail: str = ""
    figures: list[Figure] = field(default_factory=list)


class StageRunner:
    """Runs the stages of one check within its remaining time."""

    def __init__(
        self,
        out: Path,
        *,
        device: str,
        quick: bool,
        budget: float,
        limit: float | None = None,
        site: Path | None = None,
        known: Sequence[Figure] = (),
    ) -> None:
        """limit: seconds for each stage, instead of its own limit.
        site: folder with additional packages.
        known: figures of an earlier command.
        """
        self.out = out
        self.outcomes: list[Outcome] = []
        self._device = device
        self._quick = quick
        self._budget = budget
        self._limit = limit
        self._known = [*known]
        self._deadline = time.monotonic() + budget
        paths = (*PATHS, *((str(site),) if site else ()), os.environ.get("PYTHONPATH"))
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "160",
            "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        }
        self._environment.setdefault("PYTORCH_ALLOC_CONF", ALLOCATION)

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return self._deadline - time.monotonic()

    @property
    def used(self) -> float:
        """Elapsed seconds."""
        return self._budget - self.left

    def lacks(self, stage: Stage) -> list[str]:
        """Return the packages of a stage that are not installed."""
        more = ("triton",) if stage.needs and self._device == "cuda" else ()
        return missing((*stage.needs, *more))

    def run(self, stage: Stage) -> Outcome:
        """Run a stage, unless packages or time are lacking. Its errors are never raised."""
        seconds = min(self.left - REPORT_SECONDS, self._limit or stage.limit)
        least = min(stage.least, self._limit or stage.least)
        figures = self.out / f"{stage.name}.figures.jsonl"
        command = self._command(stage, figures, max(1.0, seconds - SPARE_SECONDS))
        outcome = Outcome(stage.name, self._shown(shlex.join(command)))
        self.outcomes.append(outcome)
        if absent := self.lacks(stage):
            outcome.why = f"not installed: {', '.join(absent)}"
        elif seconds < least:
            outcome.why = (
                f"{max(0.0, self.left):.0f} s of the budget are left, and it needs "
                f"{least + REPORT_SECONDS:.0f}"
            )
        if not outcome.why:
            figures.unlink(missing_ok=True)
            self._carry_out(command, seconds, outcome)
            outcome.figures = read_figures(figures)
            self._known += outcome.figures
        with (self.out / OUTCOMES).open("a") as file:
            file.write(f"{json.dumps(asdict(outcome) | {'figures': [], 'tail': ''})}\n")
        return outcome

    def _command(self, stage: Stage, figures: Path, seconds: float) -> list[str]:
        options = [*stage.options, *(("--quick",) if self._quick else ())]
        module = f"{PACKAGE}.{stage.module}"
        where = ["--figures", str(figures), "--device", self._device]
        return tied(module, *where, "--seconds", f"{seconds:.0f}", *self._speeds(), *options)

    def _speeds(self) -> list[str]:
        """Return the arguments with the measured speeds, for stages after `speeds`."""
        found = {each.metric: each.value for each in self._known}
        given = (("--copy", found.get(COPY), 1e9), ("--products", found.get(PRODUCTS), 1e12))
        return [word for name, value, unit in given if value for word in (name, f"{value * unit}")]

    def _carry_out(self, command: Sequence[str], seconds: float, outcome: Outcome) -> None:
        began = time.monotonic()
        path = self.out / f"{outcome.name}.log"
        with path.open("w") as log, scratch_folder() as scratch:
            try:
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment | {"TMPDIR": scratch},
                    cwd=ROOT,
                    start_new_session=True,
                )
            except OSError as error:  # for example, out of memory
                outcome.status, outcome.why = "failed", f"not begun: {error}"
                return
            try:
                code = process.wait(seconds)
                outcome.status = "ok" if code == 0 else "failed"
                outcome.why = "" if code == 0 else describe_status(code)
            except subprocess.TimeoutExpired:
                outcome.status, outcome.why = "timed out", f"of {seconds:.0f} s at most"
            finally:
                end(process)
        outcome.seconds = round(time.monotonic() - began, 1)
        outcome.tail = self._shown(path.read_text(errors="replace"))[-MAX_TAIL:]

    def _shown(self, text: str) -> str:
        """Replace this machine's paths, because results are published."""
        for folder, name in ((self.out, "OUT"), (ROOT, "."), (sys.prefix, "PYTHON")):
            text = text.replace(str(folder), name)
        return text


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the temporary files of a stage, which may be killed before it removes
    them.
    """
    return tempfile.TemporaryDirectory(prefix="saccade-stage-", ignore_cleanup_errors=True)


def describe_status(code: int) -> str:
    """Describe an exit status."""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def end(process: subprocess.Popen[Any]) -> None:
    """Terminate a process, then kill it and all processes of its session."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process stuck in the GPU driver cannot be killed
        process.wait(END_SECONDS)
