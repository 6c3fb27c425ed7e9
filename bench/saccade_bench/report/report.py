"""`saccade bench report`: convert result files to an HTML page and PNGs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from saccade.core.errors import ConfigError
from saccade_bench.load.journal import Saved, read_evals, read_runs
from saccade_bench.options import ReportOptions
from saccade_bench.report.page import PageSection, SideBySide, render
from saccade_bench.report.plots import plots
from saccade_bench.report.stats import Group, Workload, compare, workloads


def report(results: Sequence[Path], options: ReportOptions) -> Path:
    """Write `report.html` and its plots into the folder, and return the page's path.

    Raises ConfigError.
    """
    runs = [run for path in results for run in read_runs(path)]
    evals = [each for path in results for each in read_evals(path)]
    options.output.mkdir(parents=True, exist_ok=True)
    sections = []
    for number, workload in enumerate(workloads(runs), 1):
        drawn = plots(workload)
        for plot in drawn:
            (options.output / f"{number}-{plot.name}.png").write_bytes(plot.png)
        sections.append(
            PageSection(
                workload, tuple(_compared(workload, baseline(runs, options.baseline))), tuple(drawn)
            )
        )
    page = options.output / "report.html"
    page.write_text(render(options.title or _title(runs), sections, evals))
    return page


def baseline(runs: Sequence[Saved], wanted: str | None) -> str:
    """Return the label of the baseline. Raises ConfigError if no run has it."""
    labels = list(dict.fromkeys(run.label for run in runs))
    if wanted is not None and wanted not in labels:
        raise ConfigError(
            f"--baseline {wanted}: no run has this label; there are {', '.join(labels)}"
        )
    return wanted or labels[0]


def _compared(workload: Workload, first: str) -> list[SideBySide]:
    """Compare each other label with the baseline, at every load level that both were run at."""
    if first not in workload.labels:
        return []
    return [
        SideBySide(
            first, group.label, str(group.level), tuple(compare(mine, group)), _method(mine, group)
        )
        for group in workload.groups
        if group.label != first
        for mine in workload.groups
        if mine.label == first and mine.level == group.level
    ]


def _method(first: Group, second: Group) -> str:
    counts = f"{len(first.runs)} and {len(second.runs)} runs"
    if min(len(first.runs), len(second.runs)) < 2:
        return (
            f"{counts}: intervals cover the spread between requests, not between runs. Repeat the "
            "runs, interleaved, to know more."
        )
    if interleaved(first, second):
        return f"{counts}, interleaved."
    return f"{counts}, not interleaved: a drift of the machine may be part of the difference."


def interleaved(first: Group, second: Group) -> bool:
    """Return True if runs of the two labels alternated at least half of the time."""
    order = [
        label
        for _, label in sorted(
            (run.started, group.label) for group in (first, second) for run in group.runs
        )
    ]
    turns = sum(a != b for a, b in pairwise(order))
    return turns >= (len(order) - 1) / 2


def _title(runs: Sequence[Saved]) -> str:
    return " beside ".join(dict.fromkeys(run.label for run in runs))
