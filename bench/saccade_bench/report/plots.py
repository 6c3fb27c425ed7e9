"""The plots of a report. Each function returns a plot, or None if the runs have no data for it.

Axes of times and rates start at zero. Bands are 95 % bootstrap intervals of the median.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade_bench import plot_style
from saccade_bench.report.stats import Group, Interval, Workload, interval, stage_times

TIMES = (("ttft", "TTFT"), ("e2e", "E2E"), ("tpot", "TPOT"))
STAGE_COLOURS = {
    "fetch": "#8aa4bd",
    "digest": "#c99a1b",
    "decode": "#e4572e",
    "wait": "#c9d2db",
    "encode": "#8f5bd0",
    "prefill": "#2f6fde",
    "to first token": "#2f6fde",
    "generate": "#2a9d6f",
    "prepare": "#5d7a94",
    "network": "#e3e8ee",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A PNG, its file name without a suffix, and a caption."""

    name: str
    caption: str
    png: bytes


def plots(workload: Workload) -> list[Plot]:
    """Return all plots for which the workload's runs have data."""
    drawn = (
        by_round(workload),
        distributions(workload),
        by_concurrency(workload),
        stages(workload),
    )
    return [plot for plot in drawn if plot is not None]


def _each(workload: Workload) -> Iterator[tuple[Group, str]]:
    """Yield each label's group at its first load level, and its colour."""
    for place, label in enumerate(workload.labels):
        yield workload.of(label), plot_style.COLOURS[place % len(plot_style.COLOURS)]


def by_round(workload: Workload) -> Plot | None:
    """Plot TTFT by round of a chat."""
    if all(request["round"] == 1 for group in workload.groups for request in group.requests):
        return None
    made, axis = plot_style.figure()
    for group, colour in _each(workload):
        rounds = sorted({request["round"] for request in group.requests})
        found = [interval(group.samples("ttft", round=each)) for each in rounds]
        _line(axis, rounds, found, colour, group.label)
    plot_style.label(axis, "Time to first token by round", "round", "TTFT, median (ms)")
    _from_zero(axis)
    axis.xaxis.get_major_locator().set_params(integer=True)
    plot_style.legend(axis)
    told = "Each round resends all earlier pictures. Bands: 95 % interval of the median."
    return Plot("ttft-by-round", told, plot_style.png(made))


def _line(axis: Any, marks: list[float], found: list[Interval], colour: str, label: str) -> None:
    axis.plot(
        marks,
        [each.value for each in found],
        color=colour,
        marker="o",
        markersize=4,
        linewidth=2,
        label=label,
    )
    axis.fill_between(
        marks,
        [each.low for each in found],
        [each.high for each in found],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )


def distributions(workload: Workload) -> Plot | None:
    """Plot the cumulative distributions of TTFT, E2E and TPOT."""
    fields = [
        (field, name) for field, name in TIMES if any(g.samples(field) for g in workload.groups)
    ]
    if not fields:
        return None
    made, axes = plot_style.figure(width=3.4 * len(fields), height=3.4, columns=len(fields))
    for axis, (field, name) in zip(np.atleast_1d(axes), fields, strict=True):
        for group, colour in _each(workload):
            samples = group.samples(field)
            if samples:
                values = np.sort(np.concatenate(samples))
                axis.step(
                    values,
                    100 * np.arange(1, len(values) + 1) / len(values),
                    where="post",
                    color=colour,
                    linewidth=2,
                    label=group.label,
                )
        plot_style.label(axis, name, "ms", "requests (%)" if field == "ttft" else "")
        axis.set_ylim(0, 100)
        axis.set_xlim(left=0)
    plot_style.legend(np.atleast_1d(axes)[0], loc="lower right")
    return Plot(
        "distributions",
        "Share of requests that took at most so long; further left is faster, steeper is steadier.",
        plot_style.png(made),
    )


def by_concurrency(workload: Workload) -> Plot | None:
    """Plot throughput and TTFT by load."""
    if len(workload.levels) < 2:
        return None
    made, axes = plot_style.figure(width=9.6, columns=2)
    for place, label in enumerate(workload.labels):
        colour = plot_style.COLOURS[place % len(plot_style.COLOURS)]
        groups = sorted(
            (g for g in workload.groups if g.label == label),
            key=lambda g: g.rates("concurrency").mean(),
        )
        x = [float(group.rates("concurrency").mean()) for group in groups]
        axes[0].plot(
            x,
            [float(group.rates("output").mean()) for group in groups],
            color=colour,
            marker="o",
            linewidth=2,
            label=label,
        )
        _line(axes[1], x, [interval(group.samples("ttft")) for group in groups], colour, label)
    plot_style.label(
        axes[0], "Throughput", "requests in flight (mean, measured)", "output tokens per second"
    )
    plot_style.label(
        axes[1], "Time to first token", "requests in flight (mean, measured)", "TTFT, median (ms)"
    )
    for axis in axes:
        _from_zero(axis)
    plot_style.legend(axes[0])
    return Plot(
        "concurrency",
        "More requests side by side: throughput should rise before TTFT does.",
        plot_style.png(made),
    )


def stages(workload: Workload) -> Plot | None:
    """Plot the stages of a request's time as stacked bars."""
    rows: list[tuple[str, dict[str, float]]] = []
    for group, _ in _each(workload):
        if not group.requests:
            continue
        last = max(request["round"] for request in group.requests)
        if last == 1:
            rows.append((group.label, stage_times(group.requests)))
        for number in (1, last) if last > 1 else ():
            rows.append(
                (
                    f"{group.label}, round {number}",
                    stage_times([r for r in group.requests if r["round"] == number]),
                )
            )
    if not rows:
        return None
    made, axis = plot_style.figure(height=1.4 + 0.45 * len(rows))
    left = np.zeros(len(rows))
    longest = max(sum(times.values()) for _, times in rows)
    for stage in dict.fromkeys(name for _, times in rows for name in times):
        widths = np.asarray([times.get(stage, 0.0) for _, times in rows])
        # a bar thinner than a line needs no entry in the legend
        seen = widths.max() > 0.004 * longest
        axis.barh(
            range(len(rows)),
            widths,
            left=left,
            height=0.6,
            color=STAGE_COLOURS[stage],
            label=stage if seen else None,
        )
        left += widths
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color=plot_style.GRID)
    plot_style.label(axis, "Where a request's time went", "ms per request, mean", "")
    plot_style.legend(
        axis, loc="upper center", bbox_to_anchor=(0.5, -0.34 if len(rows) < 4 else -0.2), ncols=5
    )
    traced = any("prefill" in times for _, times in rows)
    inside = (
        "As the server reports it. Pictures are handled side by side: shown is the one that the "
        "request waited for longest."
    )
    return Plot("stages", inside if traced else "As seen from outside.", plot_style.png(made))


def _from_zero(axis: Any) -> None:
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=min(0.0, axis.get_xlim()[0]) if axis.get_xlim()[0] <= 0 else 0)
