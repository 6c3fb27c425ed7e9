"""The figures (measured values) of a stage. Each is written as a JSON line as soon as it is known,
so that a stage that fails or is stopped later does not lose it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade_bench.fixtures.interpreter import mend_interpreter
from saccade_bench.gpu_check.targets import H200

PRINTED = re.compile(r"   ([\w-]+) \| ([^|]+) \| (-?[\d.]+(?:e[+-]\d+)?) (\S+)( \+)?")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value.

    more: True if higher is better.
    floor: bound set by the hardware, in the same unit, if the stage knows it.
    note: additional information for readers.
    error: the reason if there is no value.
    """

    metric: str
    value: float | None
    unit: str
    more: bool = False
    floor: float | None = None
    note: str = ""
    error: str = ""


class FigureFile:
    """The file of one stage's figures. `failures` counts required figures that are missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.failures = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def add(self, figure: Figure) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")
        shown = figure.error or f"{figure.value:.4g} {figure.unit}"
        print(f"{figure.metric}: {shown}{'  ' + figure.note if figure.note else ''}", flush=True)

    def attempt(
        self,
        metric: str,
        measure: Callable[[], Figure | None],
        *,
        unit: str = "",
        optional: bool = False,
    ) -> bool:
        """Add the figure that `measure` returns, or one with the error if it raises. Return True if
        it did not raise.

        An error counts as a failure of the stage unless `optional`. After some CUDA errors, all
        later measurements in this process fail, too. Other stages have separate processes.
        """
        try:
            if (figure := measure()) is not None:
                self.add(figure)
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            said = f"{type(error).__name__}: {error}".split("\n")[0][:200]
            self.add(Figure(metric, None, unit, error=said))
            self.failures += not optional
            return False
        return True


def read_figures(path: Path) -> list[Figure]:
    """Read the figures of a stage, which may have been stopped while writing."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(Figure(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            break
    return found


def printed(stage: str, figure: Figure) -> str:
    """Format a figure for the output, from which `read_printed` recovers it if files are lost."""
    value = "failed" if figure.value is None else f"{figure.value:.6g} {figure.unit}"
    return f"   {stage} | {figure.metric} | {value}{' +' if figure.more else ''}"


def read_printed(text: str) -> dict[str, list[Figure]]:
    """Parse the printed figures by stage. The start of the output may be missing."""
    found: dict[str, list[Figure]] = {}
    for line in text.splitlines():
        if match := PRINTED.fullmatch(line):
            stage, metric, value, unit, more = match.groups()
            found.setdefault(stage, []).append(Figure(metric, float(value), unit, bool(more)))
    return found


def run_stage(
    name: str, doc: str | None, measure: Callable[[Any, FigureFile], Figure | None]
) -> int:
    """Run `measure` with the command line's arguments. Returns the exit status, 1 on failure."""
    args = stage_arguments(doc)
    file = FigureFile(args.figures)
    file.attempt(name, lambda: measure(args, file))
    return bool(file.failures)


def stage_arguments(doc: str | None, arguments: list[str] | None = None) -> Any:
    """Parse the arguments of every stage's process.

    figures: the file for its figures. Other files of the stage are written next to it.
    seconds: when it should be finished.
    copy, products: the measured speeds of the machine.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--copy", type=float, default=H200.copy, help="bytes/s")
    parser.add_argument("--products", type=float, default=H200.products, help="operations/s")
    parser.add_argument("--preset", default="qwen3-vl-8b")
    parser.add_argument("--fp8", action="store_true", help="weights of the language model in FP8")
    parser.add_argument("--cold", action="store_true", help="stage serving: disable caches")
    parser.add_argument("--unpaced", action="store_true", help="stage serving: prefill full chunks")
    parser.add_argument(
        "--calls", action="store_true", help="stage counters: set for the process that ncu profiles"
    )
    parser.add_argument("--tests", type=Path, help="a file of test names, one per line")
    args = parser.parse_args(arguments)
    if args.device == "cpu":
        mend_interpreter()
    return args
