"""`saccade bench ab`: two servers, speed and accuracy, in turns; the verdict says both.

Owns starting and stopping the servers it is given as command lines, the order of runs, and the
verdict. A server is whatever answers /v1/models at the port it was given. Both get the same
requests: run n of either has seed + n.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import psutil
from rich.console import Console

from saccade.core.errors import ConfigError
from saccade.ipc.own_server import endings_raised
from saccade.ipc.tied import tied
from saccade_bench.eval import ocr, shapes
from saccade_bench.eval.contract import EvalResult, GradedAnswer, Item, ask_all, summarise
from saccade_bench.eval.sampling import HttpSampler
from saccade_bench.load.client import TIMEOUT
from saccade_bench.load.journal import Saved, read_runs, write_eval
from saccade_bench.load.serve import Bench, serve
from saccade_bench.options import AbOptions
from saccade_bench.report.page import phrase
from saccade_bench.report.stats import Comparison, compare, workloads

STOP_SECONDS = 20.0
ANSWER_TOKENS = 48
ENOUGH_RUNS, ENOUGH_REQUESTS = 3, 20
"""Of each side; with fewer, the verdict is given with a warning."""


@dataclass(frozen=True, slots=True)
class Side:
    """A server of the comparison."""

    label: str
    command: str


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A server that answers at `url`. Process `pid` started all of its processes."""

    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class AccuracyPair:
    """Both results, how many answers are the same text, and the mean difference of paired scores
    (second - first) with its error.
    """

    first: EvalResult
    second: EvalResult
    same: int
    difference: float
    stderr: float

    @property
    def equal(self) -> bool:
        """True if no difference shows: it lies within two standard errors."""
        return abs(self.difference) <= 2 * self.stderr


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison. `accuracy` is None without questions."""

    speed: tuple[Comparison, ...]
    accuracy: AccuracyPair | None
    runs: int = ENOUGH_RUNS
    requests: int = ENOUGH_REQUESTS
    """Runs of each side, and requests of the smallest."""

    def lines(self, first: str, second: str) -> list[str]:
        """Two sentences, after a warning if too little was measured to say much."""
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
    """Measure both, print the verdict. Raises ConfigError if a server does not start."""
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
            {side: stack.enter_context(running(side, logs, options)).url for side in sides}
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
                        else own.enter_context(running(side, logs, options)).url
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
    """Speed from the runs, accuracy from the answers to the same questions."""
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


# Servers


@contextmanager
def running(side: Side, logs: Path, options: AbOptions) -> Iterator[StartedServer]:
    """Start a server, wait until it answers, and stop it at the end.

    Raises ConfigError with the end of its output if it never answers.
    """
    port = free_port()
    path = logs / f"{side.label.replace(os.sep, '_')}-{port}.log"
    command = shlex.split(side.command.replace("{port}", str(port)))
    if "{port}" not in side.command:
        raise ConfigError(f"the command line of {side.label} has no {{port}}: {side.command}")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{side.label} does not start: {command[0]}: no such program")
    with endings_raised(), path.open("wb") as log:
        # A session of its own: Ctrl-C ends this program, which then stops the server properly.
        process = subprocess.Popen(
            tied(command),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _await(url, process, side, path, options.start_timeout)
            yield StartedServer(url, process.pid)
        finally:
            stop(process)


def _await(
    url: str, process: subprocess.Popen[bytes], side: Side, log: Path, seconds: float
) -> None:
    end = time.monotonic() + seconds
    while not answers_models(url):
        if process.poll() is not None or time.monotonic() > end:
            why = (
                f"it ended with status {process.returncode}"
                if process.returncode is not None
                else f"no answer within {seconds:g} s"
            )
            last = log.read_text(errors="replace")[-1500:]
            raise ConfigError(f"{side.label} does not start: {why}. The end of its output:\n{last}")
        time.sleep(0.2)


def answers_models(url: str) -> bool:
    """True if a chat is possible: the models are named and /health, if present, is content."""
    try:
        with httpx.Client(base_url=url, timeout=5) as client:
            return client.get("/v1/models").is_success and client.get("/health").status_code in (
                200,
                404,
            )
    except httpx.HTTPError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, then its leftover processes."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(family, timeout=5)[1]:
        child.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
