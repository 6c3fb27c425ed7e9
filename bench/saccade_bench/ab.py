"""`saccade bench ab`: compare the speed and accuracy of two servers, measured alternately.

Both servers receive the same requests: the n-th run of each uses seed + n.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from saccade.core.errors import ConfigError
from saccade_bench.eval import ocr, shapes
from saccade_bench.eval.contract import EvalResult, GradedAnswer, Item, ask_all, summarise
from saccade_bench.eval.sampling import HttpSampler
from saccade_bench.load.client import TIMEOUT
from saccade_bench.load.journal import Saved, read_runs, write_eval
from saccade_bench.load.serve import Bench, serve
from saccade_bench.options import AbOptions
from saccade_bench.report.page import phrase
from saccade_bench.report.stats import Comparison, compare, workloads
from saccade_bench.started import Side, running

ANSWER_TOKENS = 48
ENOUGH_RUNS, ENOUGH_REQUESTS = 3, 20
"""Minimum runs per server, and requests per run, below which the verdict includes a warning."""


@dataclass(frozen=True, slots=True)
class AccuracyPair:
    """Both results, the number of identical answers, and the mean difference of paired scores
    (second - first) with its standard error.
    """

    first: EvalResult
    second: EvalResult
    same: int
    difference: float
    stderr: float

    @property
    def equal(self) -> bool:
        """True if the difference is at most two standard errors."""
        return abs(self.difference) <= 2 * self.stderr


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison. `accuracy` is None if no questions were asked."""

    speed: tuple[Comparison, ...]
    accuracy: AccuracyPair | None
    runs: int = ENOUGH_RUNS
    requests: int = ENOUGH_REQUESTS
    """Runs of the server that has fewer, and requests of the smallest run."""

    def lines(self, first: str, second: str) -> list[str]:
        """Return one sentence each on speed and accuracy, and a warning for a small sample."""
        told = [f"Speed, {second} against {first}: " + "; ".join(map(phrase, self.speed)) + "."]
        if self.runs < ENOUGH_RUNS or self.requests < ENOUGH_REQUESTS:
            told.insert(
                0,
                f"WARNING: {self.runs} run{'s' * (self.runs != 1)} of {self.requests} requests: "
                "what follows may be chance; measure with --repeats 3 and --num-prompts 20 or more",
            )
        if self.accuracy is None:
            return told
        a, b = self.accuracy.first, self.accuracy.second
        scores = (
            f"{first} {a.score:.3f} ± {a.stderr:.3f}, {second} {b.score:.3f} ± {b.stderr:.3f} "
            f"({a.name}, n = {a.n})"
        )
        failed = f"; {a.failed} and {b.failed} questions failed" if a.failed or b.failed else ""
        shown = (
            "no difference shown"
            if self.accuracy.equal
            else f"they differ by {self.accuracy.difference:+.3f} ± {self.accuracy.stderr:.3f}"
        )
        return [
            *told,
            f"Accuracy: {scores}: {shown}; {self.accuracy.same} of {a.n} answers are the same "
            f"text{failed}.",
        ]


def ab(options: AbOptions, bench: Bench) -> Verdict:
    """Measure both servers and print the verdict. Raises ConfigError if one does not start."""
    sides = (Side(options.label_a, options.a), Side(options.label_b, options.b))
    if sides[0].label == sides[1].label:
        raise ConfigError("--label-a and --label-b are the same")
    console = Console(highlight=False, quiet=bench.output.quiet)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        journal = bench.output.output_file or folder / "runs.jsonl"
        logs = options.log_dir or folder
        logs.mkdir(parents=True, exist_ok=True)
        known = {run.id for run in read_runs(journal)} if journal.exists() else set()
        kept = (
            {
                side: stack.enter_context(running(side, logs, options.start_timeout)).url
                for side in sides
            }
            if options.keep_running
            else {}
        )
        answers: dict[Side, list[GradedAnswer]] = {}
        for repeat in range(options.repeats):
            for side in sides:
                console.print(f"run {repeat + 1} of {options.repeats}: {side.label}")
                with ExitStack() as own:
                    url = (
                        kept[side]
                        if side in kept
                        else own.enter_context(running(side, logs, options.start_timeout)).url
                    )
                    serve(_bench(bench, side, url, journal, repeat))
                    if repeat == 0 and options.eval != "none":
                        answers[side] = _ask(url, _questions(options, bench.load.seed))
                        write_eval(journal, side.label, summarise(options.eval, answers[side]))
        verdict = judge(
            sides, [run for run in read_runs(journal) if run.id not in known], options.eval, answers
        )
    for line in verdict.lines(sides[0].label, sides[1].label):
        console.print(line)
    return verdict


def _bench(bench: Bench, side: Side, url: str, journal: Path, repeat: int) -> Bench:
    return replace(
        bench,
        target=replace(bench.target, base_url=url),
        load=replace(bench.load, seed=bench.load.seed + repeat),
        output=replace(bench.output, label=side.label, output_file=journal),
    )


def _questions(options: AbOptions, seed: int) -> list[Item]:
    items = ocr.items if options.eval == "ocr" else shapes.items
    return items(options.eval_prompts, seed)


def _ask(url: str, items: Sequence[Item]) -> list[GradedAnswer]:
    sampler = HttpSampler.connect(url, None, {}, ANSWER_TOKENS, {}, TIMEOUT)
    with closing(sampler.client):
        return ask_all(items, sampler, concurrency=4)


def judge(
    sides: tuple[Side, Side],
    runs: Sequence[Saved],
    name: str,
    answers: dict[Side, list[GradedAnswer]],
) -> Verdict:
    """Compare speed by the runs, and accuracy by the answers to the same questions."""
    (workload,) = workloads(runs)
    first, second = (workload.of(side.label) for side in sides)
    speed = tuple(
        row
        for row in compare(first, second)
        if row.metric.endswith("median") or row.metric == "Requests"
    )
    each = [[run for run in runs if run.label == side.label] for side in sides]
    few = min(map(len, each)), min(len(run.requests) for run in runs)
    if not answers:
        return Verdict(speed, None, *few)
    by_id = [{answer.id: answer for answer in answers[side]} for side in sides]
    pairs = [(by_id[0][key], by_id[1][key]) for key in by_id[0]]
    gaps = np.asarray([b.score - a.score for a, b in pairs])
    same = sum(a.text == b.text and a.error is None and b.error is None for a, b in pairs)
    results = [summarise(name, answers[side]) for side in sides]
    return Verdict(
        speed,
        AccuracyPair(
            results[0], results[1], same, float(gaps.mean()), float(gaps.std() / np.sqrt(len(gaps)))
        ),
        *few,
    )
