"""The display of `saccade bench media`'s figures: tables for the terminal and a bar chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from saccade_bench import plot_style
from saccade_bench.lab.media_figures import OUR_STAGES, USUAL_STAGES, Case, MediaFigure, Sample
from saccade_bench.plot_style import COLOURS, GRID, INK

NAMES = {"random": "noise"}


def tables(results: Sequence[MediaFigure]) -> Group:
    """The whole path, and the stages of both."""
    return Group(
        _whole(results),
        "",
        _stages(
            "Saccade, a new picture: ms of CPU by stage",
            OUR_STAGES,
            [(r.case, r.stages) for r in results],
        ),
        "",
        _stages(
            "The usual way: ms of CPU by stage",
            USUAL_STAGES,
            [(r.case, r.usual_stages) for r in results],
        ),
    )


def _whole(results: Sequence[MediaFigure]) -> Table:
    table = Table(
        title="CPU of all processes, from a data URL to rows for the tower (medians)",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("picture")
    for name in (
        "encoded",
        "usual ms",
        "new ms",
        "less",
        "seen ms",
        "less",
        "usual ships",
        "new ships",
    ):
        table.add_column(name, justify="right")
    for r in results:
        sizes = [r.stages["digest"].nbytes, r.usual.nbytes, r.new.nbytes]
        encoded, usual, new = (f"{size / 1e6:.2f} MB" for size in sizes)
        times = (
            f"{r.usual.ms:.1f}",
            f"{r.new.ms:.2f}",
            f"{r.gain_new:.1f}x",
            f"{r.seen.ms:.3f}",
            f"{r.gain_seen:.0f}x",
        )
        table.add_row(label(r.case), encoded, *times, usual, new)
    return table


def _stages(
    title: str, names: Sequence[str], rows: Sequence[tuple[Case, dict[str, Sample]]]
) -> Table:
    """Each cell: ms, and the MB that go into the stage."""
    table = Table(title=title + " (MB that go into it)", title_justify="left", title_style="bold")
    table.add_column("picture")
    for stage in names:
        table.add_column(stage, justify="right")
    for case, stages in rows:
        cells = (stages.get(stage) for stage in names)
        table.add_row(
            label(case),
            *(f"{cell.ms:.2f} ({cell.nbytes / 1e6:.2f})" if cell else "-" for cell in cells),
        )
    return table


def label(case: Case) -> str:
    return (
        f"{case.width}x{case.height} {case.format.upper()} {NAMES.get(case.content, case.content)}"
    )


SEGMENTS: tuple[tuple[str, bool, tuple[str, ...], str], ...] = (
    ("usual: base64, decode", False, ("base64", "decode"), "#5d6b7a"),
    ("usual: processor", False, ("processor",), "#8794a3"),
    ("usual: sha256 of the floats", False, ("sha256",), "#b1bbc6"),
    ("usual: pickle to another process", False, ("pickle",), "#d5dbe2"),
    ("new: base64, digest, header", True, ("base64", "digest", "header"), "#173f8a"),
    ("new: decode, resize", True, ("decode", "resize"), "#2f6fde"),
    ("new: hand-over", True, ("hand-over",), "#7ba5ee"),
    ("new: patches", True, ("patches",), "#bdd3f8"),
)
"""Of the chart: name, whether it is ours, the stages it sums up, colour.

Grey is the usual way, blue a new picture of ours.
"""
SEEN = ("seen before", COLOURS[1])
BAR = 0.27


def chart(results: Sequence[MediaFigure]) -> bytes:
    """A PNG: a panel per size, three bars per kind of picture, one linear scale for all.

    Raises ConfigError without matplotlib.
    """
    sizes = list(dict.fromkeys((r.case.width, r.case.height) for r in results))
    kinds = max(sum((r.case.width, r.case.height) == size for r in results) for size in sizes)
    made, axes = plot_style.figure(4.4 * len(sizes) + 1, 1.9 + 1.05 * kinds, len(sizes))
    axes = [axes] if len(sizes) == 1 else list(axes)
    longest = max(max(r.usual.ms, r.new.ms) for r in results)
    for axis, size in zip(axes, sizes, strict=True):
        shown = [r for r in results if (r.case.width, r.case.height) == size]
        _panel(axis, shown, longest)
        plot_style.label(axis, f"{size[0]} x {size[1]}", "ms of CPU per picture", "")
    handles, labels = axes[0].get_legend_handles_labels()
    made.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )
    title = (
        "What a picture costs: the usual way, new, and seen before (CPU of all processes, from a "
        "data URL to rows for the tower)"
    )
    made.suptitle(title, x=0.012, ha="left", fontsize=12.5, color=INK, fontweight="bold")
    return plot_style.png(made)


def _panel(axis: Any, shown: Sequence[MediaFigure], longest: float) -> None:
    axis.grid(False)
    axis.grid(axis="x", color=GRID, linewidth=1)
    for row, r in enumerate(shown):
        ends = {True: 0.0, False: 0.0}
        for title, ours, stages, colour in SEGMENTS:
            part = r.stages if ours else r.usual_stages
            width = sum(part[stage].ms for stage in stages if stage in part)
            axis.barh(
                row + (0 if ours else -BAR),
                width,
                BAR * 0.9,
                left=ends[ours],
                color=colour,
                label=None if row else title,
            )
            ends[ours] += width
        axis.barh(row + BAR, r.seen.ms, BAR * 0.9, color=SEEN[1], label=None if row else SEEN[0])
        seen = f"{r.seen.ms:.2f}" if r.seen.ms < 1 else f"{r.seen.ms:.1f}"
        notes = (
            (-BAR, ends[False], f"{r.usual.ms:.0f}"),
            (0, ends[True], f"{r.new.ms:.0f}  ({r.gain_new:.1f}x less)"),
        )
        for offset, end, text in (*notes, (BAR, r.seen.ms, f"{seen}  ({r.gain_seen:.0f}x less)")):
            axis.text(end + longest * 0.012, row + offset, text, va="center", fontsize=8, color=INK)
    axis.set_yticks(
        range(len(shown)),
        [f"{r.case.format.upper()}\n{NAMES.get(r.case.content, r.case.content)}" for r in shown],
    )
    axis.set_xlim(0, longest * 1.12)
    axis.set_ylim(len(shown) - 0.5, -0.5)
