"""Run published commands on a server, or on two servers, one of which has a mechanism disabled."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from saccade.core.errors import ConfigError
from saccade_bench.eval.run import evaluate
from saccade_bench.load.measure import Summary
from saccade_bench.load.serve import WORK, Bench, serve
from saccade_bench.options import EvalOptions, PublishedOptions, TargetOptions
from saccade_bench.probe import probe
from saccade_bench.published.rows import QUICK, QUICK_PROMPTS, ROWS, PublishedRow
from saccade_bench.started import Side, StartedServer, cpu_seconds, running

CLIENTS = (
    ("python3", "-m", "sglang.bench_serving"),
    ("vllm", "bench", "serve"),
    ("saccade", "bench", "serve"),
)
"""Command prefixes replaced by `saccade bench serve`, which supports their options."""
READERS: dict[str, Callable[[Summary], float]] = {
    "requests (1/s)": lambda summary: summary.throughput.requests,
    "total tokens (1/s)": lambda summary: summary.throughput.total,
    "mean TTFT (ms)": lambda summary: summary.latency.ttft.mean,
}


WIDTH = 132


@dataclass(frozen=True, slots=True)
class CommandRun:
    """The result of one command on one server.

    figures: results by metric.
    work: increase of the server's work counters.
    cpu: the server's CPU seconds, if this program started it.
    error: the reason if there are no results.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, int] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    cpu: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """A published row and its runs here. `off` is None if no mechanism was disabled."""

    row: PublishedRow
    on: CommandRun
    off: CommandRun | None = None

    @property
    def same(self) -> int | None:
        """Number of answers that are the same text with the mechanism on and off, if known."""
        if self.off is None or not 0 < len(self.on.texts) == len(self.off.texts):
            return None
        return sum(a == b for a, b in zip(self.on.texts, self.off.texts, strict=True))


Arguments = Mapping[str, Any]
Parse = Callable[[Sequence[str]], Arguments]
"""Parses a command line into the arguments of the command's function, by name."""
OnRun = Callable[[PublishedRow, str, CommandRun], None]
"""Called after each run with its label: "on", or "off" if the mechanism is disabled."""


def published(
    target: TargetOptions, options: PublishedOptions, parse: Parse
) -> list[PublishedResult]:
    """Run the commands, print the results and return them. Raises ConfigError."""
    rows = chosen(options.only)
    console = Console(highlight=False, stderr=options.json, width=WIDTH)
    if options.server is None:
        found = [PublishedResult(row, run_row(row, target, options, parse)) for row in rows]
    else:
        with tempfile.TemporaryDirectory() as logs:
            on_run = partial(_print_run, console)
            found = list(pairs(rows, options.server, options, parse, Path(logs), on_run))
    if options.json:
        print(json.dumps([as_json(each) for each in found]))
    else:
        console.print(table(found))
    return found


def chosen(names: Sequence[str]) -> list[PublishedRow]:
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]}: the names are {', '.join(known)}")
    return [known[name] for name in names] or [*ROWS]


def pairs(
    rows: Sequence[PublishedRow],
    command: str,
    options: PublishedOptions,
    parse: Parse,
    logs: Path,
    on_run: OnRun,
) -> Iterator[PublishedResult]:
    """Yield each row's results with the mechanism on, and off if `row.off` has options.

    One server runs all the commands that it can before the next one starts. `on_run` is called
    after each run.
    """

    def run_all(label: str, some: Sequence[PublishedRow], *more: str) -> list[CommandRun]:
        runs = []
        whole = shlex.join((*shlex.split(command), *more)).replace("'{port}'", "{port}")
        with running(Side(label, whole), logs, options.start_timeout) as server:
            target = TargetOptions(base_url=server.url)
            for row in some:
                runs.append(run_row(row, target, options, parse, server))
                on_run(row, label, runs[-1])
        return runs

    off: dict[str, CommandRun] = {}
    on = run_all("on", rows)
    measured = [row for row, run in zip(rows, on, strict=True) if row.off and not run.error]
    for switch in dict.fromkeys(row.off for row in measured):
        some = [row for row in measured if row.off == switch]
        runs = run_all("off", some, *switch)
        off |= {row.name: run for row, run in zip(some, runs, strict=True)}
    for row, run in zip(rows, on, strict=True):
        yield PublishedResult(row, run, off.get(row.name))


def _print_run(console: Console, row: PublishedRow, label: str, run: CommandRun) -> None:
    console.print(f"{label}: {row.name}{': ' * bool(run.error)}{run.error}")


def run_row(
    row: PublishedRow,
    target: TargetOptions,
    options: PublishedOptions,
    parse: Parse,
    server: StartedServer | None = None,
) -> CommandRun:
    """Run a row's command. If it cannot run, the reason is in the result's `error`."""
    try:
        words = command_of(row, options)
        before = cpu_seconds(server.pid) if server else 0.0
        found = COMMANDS[words[0]](parse(words), target)
    except ConfigError as error:
        return CommandRun(error=str(error))
    return replace(found, cpu=cpu_seconds(server.pid) - before if server else None)


def command_of(row: PublishedRow, options: PublishedOptions) -> list[str]:
    """Convert a row's command to one of this package, without its address and model name.

    Raises ConfigError if it needs a data set that is not available.
    """
    words = shlex.split(row.command)
    for client in CLIENTS:
        if tuple(words[: len(client)]) == client:
            words[: len(client)] = ("bench", "serve")
    words = words[words[0] == "saccade" :]
    for name in ("--port", "--model"):
        if name in words:
            del words[words.index(name) : words.index(name) + 2]
    if row.data:
        path = {"mmmu": options.mmmu, "ocrbench": options.ocrbench}[row.data]
        if path is None and options.quick:
            raise ConfigError(f"needs --{row.data} PATH")
        words += () if path is None else ("--dataset-path", path)
    if options.quick:
        for place in [i for i, word in enumerate(words) if word in QUICK]:
            words[place + 1] = QUICK[words[place]]
    most = QUICK_PROMPTS if options.quick else options.num_prompts
    if most is not None and "--num-prompts" in words:
        place = words.index("--num-prompts") + 1
        words[place] = str(min(int(words[place]), most))
    if words[0] != "eval":  # each row has its own images, so that none hits another's cache entries
        words += ("--seed", str(1000 * options.seed + ROWS.index(row)))
    return words


def _serve(found: Arguments, target: TargetOptions) -> CommandRun:
    given = Bench(**found)
    output = replace(given.output, quiet=True)
    measured = serve(replace(given, target=target, output=output))
    summary = measured.summary
    if not summary.completed:
        raise ConfigError(f"no request was answered: {next(iter(summary.examples.values()), '?')}")
    figures = {name: read(summary) for name, read in READERS.items()}
    figures |= {f"TTFT of round {each.number} (ms)": each.ttft.mean for each in summary.rounds}
    return CommandRun(figures, measured.work, tuple(r.reply.text for r in measured.run.records))


def _probe(found: Arguments, target: TargetOptions) -> CommandRun:
    options = replace(found["options"], quiet=True)
    steps = probe(replace(target, timeout=found["target"].timeout), options)
    good = [step for step in steps if not step.failure]
    most = max((step.images for step in good), default=0)
    ttfts = {
        f"TTFT of {step.images} images (ms)": step.ttft for step in good if step.ttft is not None
    }
    return CommandRun({"images in one request": most, **ttfts})


def _eval(found: Arguments, target: TargetOptions) -> CommandRun:
    options = replace(found.get("options", EvalOptions()), quiet=True)
    return CommandRun({"score": evaluate(found["name"], target, options).score})


COMMANDS: dict[str, Callable[[Arguments, TargetOptions], CommandRun]] = {
    "bench": _serve,
    "probe": _probe,
    "eval": _eval,
}


# ---- the table


def table(found: Sequence[PublishedResult]) -> Table:
    """Return a table with a line for each metric and counter, with the mechanism on and off."""
    shown = Table("row", "figure", "published", "here, on", "here, off", "on / off")
    for column in shown.columns[2:]:
        column.justify = "right"
    for each in found:
        name = f"{each.row.name}\n{each.row.source}: {each.row.setting}"
        for place, line in enumerate(lines(each)):
            shown.add_row(name if place == 0 else "", *line)
        shown.add_section()
    return shown


def lines(each: PublishedResult) -> Iterator[tuple[str, ...]]:
    """Yield (metric, published, on, off, ratio) as text."""
    on, off = each.on, each.off or CommandRun()
    for metric in each.row.figures:
        theirs = each.row.published(metric)
        yield metric, theirs, *_pair(on.figures.get(metric), off.figures.get(metric))
    for name, people in WORK.items():
        if on.work.get(name) or off.work.get(name):
            yield people, "", *_pair(on.work.get(name), off.work.get(name))
    if on.cpu is not None:
        yield "CPU (s)", "", *_pair(on.cpu, off.cpu)
    if each.same is not None:
        yield "same answers", "", f"{each.same} of {len(on.texts)}", "", ""
    for label, error in (("on", on.error), ("off", off.error)):
        if error:
            yield f"{label}: {error}", "", "", "", ""


def _pair(on: float | None, off: float | None) -> tuple[str, str, str]:
    ratio = f"{on / off:.3f}" if on is not None and off else ""
    left, right = ("-" if value is None else f"{value:.5g}" for value in (on, off))
    return left, right, ratio


def as_json(each: PublishedResult) -> dict[str, Any]:
    """Return a result as JSON data, without the answers' texts."""
    runs = {"on": each.on, "off": each.off}
    results = {
        name: None if run is None else {k: v for k, v in asdict(run).items() if k != "texts"}
        for name, run in runs.items()
    }
    return {
        "name": each.row.name,
        "source": each.row.source,
        "setting": each.row.setting,
        "command": each.row.command,
        "published": each.row.figures,
        "same_answers": each.same,
        "answers": len(each.on.texts),
        **results,
    }
