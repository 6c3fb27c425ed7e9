"""Summaries of runs as tables on a terminal."""

from __future__ import annotations

import math
from collections.abc import Collection

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from saccade_bench.load.measure import LATENCIES, Distribution, Summary

SLOW_GENERATOR_MS = 10.0
"""Above this P99 delay of the load generator, warn that it may have affected the latencies."""


ALREADY_CACHED = 0.25
"""Cached fraction of prompts with new images above which these images must have been cached.

The system prompt, which precedes the images, is a smaller part of a prompt.
"""


def print_summary(
    summary: Summary, title: str, drawn: bool, latencies: Collection[str] = LATENCIES
) -> None:
    Console(highlight=False).print(render(summary, title, drawn, latencies))


def render(
    summary: Summary, title: str, drawn: bool = True, latencies: Collection[str] = LATENCIES
) -> Group:
    """Return the tables of a summary, or only its title and notes if no request succeeded.

    `drawn` is True if the images depend on the seed. Images from files are the same in every run.
    """
    parts: list[RenderableType] = (
        [_figures(summary, title), _latencies(summary, latencies)]
        if summary.completed
        else [Text(title, style="bold")]
    )
    if summary.rounds:
        parts.append(_rounds(summary))
    parts += [Text(line, style="yellow") for line in notes(summary, drawn)]
    return Group(*parts)


def notes(summary: Summary, drawn: bool = True) -> list[str]:
    """Return the warnings to read before using the numbers."""
    found = []
    if summary.failures:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(summary.failures.items()))
        rest = (
            "The figures are of the answered requests only."
            if summary.completed
            else "Not one request was answered."
        )
        found.append(f"Failed: {kinds}. {rest}")
        found += [f"{kind}: {message}" for kind, message in sorted(summary.examples.items())]
    share = summary.tokens.cached_unsent
    if drawn and share is not None and share > ALREADY_CACHED:
        found.append(
            f"Prompts whose pictures are new in this run were cached to {100 * share:.0f} %: "
            "the server has seen these pictures, in an "
            "earlier run with this seed. The figures are those of its cache: for new pictures "
            "use another --seed, or a fresh server."
        )
    worst = max(_or_zero(summary.lateness.send.p99), _or_zero(summary.lateness.loop.p99))
    if worst > SLOW_GENERATOR_MS:
        found.append(
            f"The load generator itself was late: P99 {worst:.1f} ms. Latencies may be its "
            "own; measure from a calmer machine."
        )
    return found


def _figures(summary: Summary, title: str) -> Table:
    rate, tokens = summary.throughput, summary.tokens
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column()
    table.add_column(justify="right")
    split = "" if tokens.vision_known else " (estimated)"
    rows: list[tuple[str, str]] = [
        ("Requests sent / answered", f"{summary.sent} / {summary.completed}"),
        ("Duration (s)", f"{summary.duration:.2f}"),
        ("Pictures sent / sent before", f"{summary.images} / {summary.images_seen}"),
        (f"Input tokens, text / vision{split}", f"{tokens.text} / {tokens.vision}"),
        (
            "Cached input tokens",
            "not reported"
            if tokens.cached is None
            else f"{tokens.cached} ({_share(tokens.cached, tokens.prompt)})",
        ),
        ("Output tokens", f"{tokens.output}"),
        *(
            ()
            if summary.retokenized is None
            else [("Output tokens (retokenized)", f"{summary.retokenized}")]
        ),
        ("Request throughput (req/s)", f"{rate.requests:.2f}"),
        ("Input text throughput (tok/s)", f"{rate.input_text:.1f}"),
        ("Input vision throughput (tok/s)", f"{rate.input_vision:.1f}"),
        ("Output throughput (tok/s)", f"{rate.output:.1f}"),
        ("Total token throughput (tok/s)", f"{rate.total:.1f}"),
        ("Peak output throughput (tok/s)", f"{rate.peak_output:.0f}"),
        ("Peak concurrent requests", f"{rate.peak_requests}"),
        ("Concurrency", f"{rate.concurrency:.2f}"),
    ]
    if rate.goodput is not None:
        rows.append(("Goodput (req/s)", f"{rate.goodput:.2f}"))
    if summary.accuracy:
        rows.append(
            (
                f"Right answers of {summary.accuracy.n}",
                f"{100 * summary.accuracy.score:.1f} % ± {100 * summary.accuracy.stderr:.1f}",
            )
        )
    for level, count in sorted((summary.outcomes or {}).items()):
        rows.append((f"Pictures found in: {level}", str(count)))
    for kind, count in sorted(summary.failures.items()):
        rows.append((f"Failed: {kind}", str(count)))
    for row in rows:
        table.add_row(*row)
    return table


def _latencies(summary: Summary, shown: Collection[str]) -> Table:
    table = Table("ms", "mean", "median", "P90", "P95", "P99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    latency, late = summary.latency, summary.lateness
    for name, values in (
        ("E2E", latency.e2e),
        ("TTFT", latency.ttft),
        ("TPOT", latency.tpot),
        ("ITL", latency.itl),
    ):
        if name.lower().replace("e2e", "e2el") in shown:
            table.add_row(name, *_cells(values))
    if summary.beside:
        table.add_row("ITL of text, no image in flight", *_cells(summary.beside.alone))
        table.add_row("ITL of text beside images", *_cells(summary.beside.images))
    table.add_section()
    table.add_row("generator: sent late", *_cells(late.send), style="dim")
    table.add_row("generator: loop delay", *_cells(late.loop), style="dim")
    return table


def _rounds(summary: Summary) -> Table:
    names = ("round", "n", "images", "prompt", "cached", "TTFT mean", "P50", "P99", "E2E mean")
    table = Table(*names)
    for column in table.columns:
        column.justify = "right"
    for line in summary.rounds:
        cached = "-" if line.cached is None else f"{100 * line.cached:.0f} %"
        table.add_row(
            str(line.number),
            str(line.n),
            f"{line.images:.0f}",
            f"{line.prompt:.0f}",
            cached,
            *(
                _ms(value)
                for value in (line.ttft.mean, line.ttft.median, line.ttft.p99, line.e2e.mean)
            ),
        )
    return table


def _cells(values: Distribution) -> list[str]:
    return [
        _ms(value)
        for value in (values.mean, values.median, values.p90, values.p95, values.p99, values.max)
    ]


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
