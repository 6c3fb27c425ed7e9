"""Stage `published`: run the commands behind published benchmarks, each on a server with all
mechanisms, and on one without the mechanism for which the command was published.

The model has random weights. Fewer requests are sent than in the original, with the same
concurrency.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade_bench.cli import parsed
from saccade_bench.gpu_check.figures import Figure, FigureFile, run_stage
from saccade_bench.gpu_check.serving import HOST_TIERS, SMALL_SERVER, server_command
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.load.serve import WORK
from saccade_bench.options import PublishedOptions
from saccade_bench.published.rows import PublishedRow
from saccade_bench.published.run import CommandRun, chosen, pairs

NAMES = ("vit-graphs", "position-cache", "chat-720p", "hash-off-scheduler")
"""Rows in order of importance, because the machine may only be available for minutes."""
PROMPTS = 96


def measure(args: Any, file: FigureFile) -> None:
    """Run all commands, and add each figure as soon as it is known."""

    def on_run(row: PublishedRow, label: str, run: CommandRun) -> None:
        for figure in figures(row, label, run):
            file.add(figure)
        file.failures += bool(run.error)

    with tempfile.TemporaryDirectory(prefix="saccade-check-") as name:
        preset = "tiny-qwen3-vl" if args.quick else args.preset
        more = SMALL_SERVER if args.quick else HOST_TIERS
        folder = make_checkpoint(preset, Path(name) / "model")
        command = server_command(folder, args.device, *more)
        options = PublishedOptions(
            num_prompts=PROMPTS, quick=args.quick, start_timeout=args.seconds
        )
        rows = chosen(NAMES)
        for each in pairs(rows, command, options, parsed, args.figures.parent, on_run):
            if each.same is not None:
                share = 100 * each.same / len(each.on.texts)
                file.add(Figure(f"{each.row.name}, same answers", share, "%", more=True))


def figures(row: PublishedRow, label: str, run: CommandRun) -> Iterator[Figure]:
    """Yield a run's figures for published metrics, and its server's counters."""
    if run.error:
        yield Figure(f"{row.name}, {label}", None, "", error=run.error)
        return
    for metric in row.figures:
        if (value := run.figures.get(metric)) is not None:
            name, _, unit = metric.removesuffix(")").rpartition(" (")
            note = f"published ({row.setting}): {row.published(metric)}"
            yield Figure(f"{row.name}, {name}, {label}", value, unit, unit == "1/s", note=note)
    for name, count in run.work.items():
        if count:
            yield Figure(f"{row.name}, {WORK[name]}, {label}", count, "times")


def main() -> int:
    return run_stage("published", __doc__, measure)


if __name__ == "__main__":
    sys.exit(main())
