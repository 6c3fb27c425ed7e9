"""A report as one self-contained HTML page. Numbers are from `stats`, images from `plots`."""

from __future__ import annotations

import base64
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from saccade_bench.load.journal import Saved, SavedEval
from saccade_bench.report.plots import Plot
from saccade_bench.report.stats import Comparison, Interval, Workload

TEMPLATE = Path(__file__).with_name("page.html")
LATE_MS = 10.0


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two labels compared under the same load level."""

    first: str
    second: str
    level: str
    rows: tuple[Comparison, ...]
    method: str


@dataclass(frozen=True, slots=True)
class PageSection:
    """One workload on the page."""

    workload: Workload
    tables: tuple[SideBySide, ...]
    plots: tuple[Plot, ...]


def render(title: str, sections: Sequence[PageSection], evals: Sequence[SavedEval]) -> str:
    """Return the page as HTML."""
    environment = Environment(autoescape=True)
    environment.filters.update(
        figure=figure,
        times=times,
        span=span,
        verdict=verdict,
        cached=cached,
        b64=b64,
    )
    runs = [run for section in sections for group in section.workload.groups for run in group.runs]
    return environment.from_string(TEMPLATE.read_text()).render(
        title=title,
        when=_when(runs),
        headlines=headlines(sections, evals),
        notes=notes(runs),
        evals=evals,
        sections=sections,
    )


def headlines(sections: Sequence[PageSection], evals: Sequence[SavedEval]) -> list[str]:
    """Return a short summary: each label's comparison at its first load level, then accuracy."""
    lines = []
    for section in sections:
        first_level = {table.second: table for table in reversed(section.tables)}
        for table in reversed(first_level.values()):
            told = "; ".join(phrase(row) for row in table.rows if row.metric in _telling(table))
            lines.append(
                f"{table.second} against {table.first}: {told}. ({section.workload.name}; "
                f"{table.level})"
            )
        if not section.tables:
            lines += [_alone(section.workload, group.label) for group in section.workload.groups]
    for each in evals:
        lines.append(
            "{} scores {score:.3f} ± {stderr:.3f} in {name} (n = {n}).".format(
                each.label, **each.result
            )
        )
    return lines


def phrase(row: Comparison) -> str:
    """Describe one comparison. A difference within the confidence interval is not reported."""
    values = f"{figure(row.first)} → {figure(row.second)} {row.unit}"
    ratio = row.ratio
    if math.isnan(ratio.value) or not ratio.value:
        return f"{row.metric}: not comparable ({values})"
    if ratio.low <= 1 <= ratio.high:
        return f"{row.metric}: no difference shown ({values})"
    better = ratio.value >= 1
    return (
        f"{row.metric} {times(ratio.value if better else 1 / ratio.value)} "
        f"{'better' if better else 'worse'} ({values})"
    )


def _telling(table: SideBySide) -> tuple[str, ...]:
    """Return the metrics of a headline. For chats, TTFT is the last round's."""
    last = next((row.metric for row in table.rows if row.metric.startswith("TTFT of round")), None)
    return (last or "TTFT, median", "TPOT, median", "Requests")


def _alone(workload: Workload, label: str) -> str:
    summary = workload.of(label).runs[0].summary
    latency, rate = summary["latency"], summary["throughput"]
    failed = (
        f", {summary['sent'] - summary['completed']} of {summary['sent']} failed"
        if summary["sent"] != summary["completed"]
        else ""
    )
    return (
        f"{label} ({workload.name}; {workload.of(label).level}): TTFT "
        f"{figure(latency['ttft']['median'])} ms at the median, "
        f"{figure(latency['ttft']['p99'])} at P99, {figure(rate['output'])} output "
        f"tokens/s{failed}."
    )


def notes(runs: Sequence[Saved]) -> list[str]:
    """Return the warnings to read before using the numbers."""
    found = []
    for run in runs:
        if run.summary["failures"]:
            kinds = ", ".join(
                f"{count} × {kind}" for kind, count in sorted(run.summary["failures"].items())
            )
            found.append(f"{run.label}: {kinds}. Its figures are of the answered requests only.")
        late = run.summary["lateness"]
        worst = max(late["send"]["p99"] or 0.0, late["loop"]["p99"] or 0.0)
        if worst > LATE_MS:
            found.append(
                f"{run.label}: the load generator itself was late (P99 {worst:.0f} ms), so its "
                "times may be too long by that."
            )
    return list(dict.fromkeys(found))


def _when(runs: Sequence[Saved]) -> str:
    days = sorted(
        {
            datetime.datetime.fromtimestamp(run.started, datetime.UTC).strftime("%Y-%m-%d")
            for run in runs
        }
    )
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{len(runs)} run{'s' * (len(runs) != 1)}, {span}"


# Formatting of numbers


def b64(png: bytes) -> str:
    return base64.b64encode(png).decode()


def figure(value: float | None) -> str:
    """Format with about three significant digits. None and NaN become a dash."""
    if value is None or math.isnan(value):
        return "–"
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def times(value: float) -> str:
    return "–" if math.isnan(value) else f"{figure(value)} ×"


def span(ratio: Interval) -> str:
    return "–" if math.isnan(ratio.low) else f"{figure(ratio.low)} to {figure(ratio.high)}"


def verdict(ratio: Interval) -> str:
    """Return the CSS class of a ratio whose interval excludes 1, or an empty string."""
    return "better" if ratio.low > 1 else "worse" if ratio.high < 1 else ""


def cached(tokens: dict[str, int | None]) -> str:
    hits, prompt = tokens["cached"], tokens["prompt"]
    return "–" if hits is None or not prompt else f"{100 * hits / prompt:.0f} %"
