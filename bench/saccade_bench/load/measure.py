"""Metrics of a run.

Times are in milliseconds and rates per second. E2E is the time from sending a request to the end of
its answer, TTFT to the first text, and ITL between two events with text. TPOT is the time from the
first to the last text, divided by (output tokens - 1). Percentiles are numpy's (linear). Token
counts are the server's. Failed requests only count as failures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from saccade.core.errors import ConfigError
from saccade_bench.eval.ocr import says
from saccade_bench.load.datasets import Calibration
from saccade_bench.load.load import LoadRun, Record

PERCENTILES = (50, 90, 95, 99)
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
LATENCIES = (*GOODPUT_METRICS, "itl")
"""Names as in other benchmark clients."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of n values in ms. They are NaN if n is 0."""

    n: int
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Distribution:
        if not values:
            nan = float("nan")
            return Distribution(0, nan, nan, nan, nan, nan, nan)
        array = np.asarray(values)
        median, p90, p95, p99 = map(float, np.percentile(array, PERCENTILES))
        return Distribution(
            len(values), float(array.mean()), median, p90, p95, p99, float(array.max())
        )


@dataclass(frozen=True, slots=True)
class Latency:
    """The four latency distributions that serving benchmarks report."""

    e2e: Distribution
    ttft: Distribution
    tpot: Distribution
    itl: Distribution

    @staticmethod
    def of(records: Sequence[Record]) -> Latency:
        return Latency(
            e2e=Distribution.of([e2e(r) for r in records]),
            ttft=Distribution.of([ttft(r) for r in records]),
            tpot=Distribution.of([time for r in records if (time := tpot(r)) is not None]),
            itl=Distribution.of([gap for r in records for gap in itls(r)]),
        )


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Totals over the successful requests.

    `vision_known` is True if the server reports vision tokens. Otherwise they are estimated as the
    prompt tokens minus the measured length of its text. `cached` is None if the server does not
    report it. `cached_unsent` is the cached fraction of prompts in which all images are new in this
    run. It is None if the server does not report it, or if there are no such prompts.
    """

    prompt: int
    text: int
    vision: int
    output: int
    cached: int | None
    vision_known: bool
    cached_unsent: float | None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates per second over the entire run, but `peak_output` is the rate of the best second.

    `peak_requests` and `concurrency` are the maximum and the mean number of requests in flight.
    """

    requests: float
    input_text: float
    input_vision: float
    output: float
    total: float
    peak_output: float
    peak_requests: int
    concurrency: float
    goodput: float | None


@dataclass(frozen=True, slots=True)
class Round:
    """All requests of one round (turn index) of the chats.

    `n` requests succeeded. `images` and `prompt` (tokens) are means, and `cached` is the cached
    fraction of the prompt tokens.
    """

    number: int
    n: int
    images: float
    prompt: float
    cached: float | None
    ttft: Distribution
    e2e: Distribution


@dataclass(frozen=True, slots=True)
class Lateness:
    """Delays of the load generator itself in ms: of sending a request after it was due, and of
    callbacks in the event loop.
    """

    send: Distribution
    loop: Distribution


@dataclass(frozen=True, slots=True)
class Beside:
    """ITL of text answers in a run that also sends images: of gaps without an image request in
    flight (`alone`), and of gaps with one (`images`).
    """

    alone: Distribution
    images: Distribution


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of the answers whose expected text is known."""

    n: int
    score: float
    stderr: float


@dataclass(frozen=True, slots=True)
class Summary:
    """All metrics of a run.

    `failures` counts failures by kind, and `examples` has the first message of each kind.
    `outcomes` counts images by the cache tier in which a Saccade server found them. It is None
    without traces.
    """

    # requests
    sent: int
    completed: int
    failures: Mapping[str, int]
    examples: Mapping[str, str]
    duration: float
    # their contents
    images: int
    images_seen: int
    tokens: TokenTotals
    # times
    throughput: Throughput
    latency: Latency
    rounds: tuple[Round, ...]
    lateness: Lateness
    # answers
    accuracy: Accuracy | None
    outcomes: Mapping[str, int] | None
    beside: Beside | None
    retokenized: int | None = None  # tokens of the answers' texts; None: no /tokenize


def e2e(record: Record) -> float:
    return 1e3 * (record.reply.done - record.reply.sent)


def ttft(record: Record) -> float:
    return 1e3 * (record.reply.arrivals[0] - record.reply.sent)


def output_tokens(record: Record) -> int:
    """Return the server's count, or the number of events with text if it does not report one."""
    reply = record.reply
    return reply.usage.completion if reply.usage.completion is not None else len(reply.arrivals)


def tpot(record: Record) -> float | None:
    """Return the time per output token in ms.

    Return None for an answer of one token or one event (tokens without text send no event).
    """
    tokens, arrivals = output_tokens(record), record.reply.arrivals
    return (
        1e3 * (arrivals[-1] - arrivals[0]) / (tokens - 1)
        if tokens > 1 and len(arrivals) > 1
        else None
    )


def itls(record: Record) -> list[float]:
    arrivals = record.reply.arrivals
    return [1e3 * (after - before) for before, after in pairwise(arrivals)]


def text_beside_images(records: Sequence[Record]) -> Beside | None:
    """Return None unless the run has requests both with and without images."""
    texts = [r for r in records if not r.turn.images]
    busy = sorted((r.reply.sent, r.reply.arrivals[0]) for r in records if r.turn.images)
    if not texts or not busy:
        return None
    alone: list[float] = []
    beside: list[float] = []
    for record in texts:
        for before, after in pairwise(record.reply.arrivals):
            shared = any(begin < after and before < end for begin, end in busy)
            (beside if shared else alone).append(1e3 * (after - before))
    return Beside(Distribution.of(alone), Distribution.of(beside))


def parse_goodput(texts: Iterable[str]) -> dict[str, float]:
    """Parse bounds such as "ttft:500" into {"ttft": 500.0} (ms). Raises ConfigError."""
    bounds = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            bounds[name] = float(value)
        except ValueError:
            name = ""
        if name not in GOODPUT_METRICS:
            raise ConfigError(
                f"--goodput {text}: expected one of {', '.join(GOODPUT_METRICS)}, a colon and "
                "milliseconds"
            )
    return bounds


def parse_metrics(text: str) -> frozenset[str]:
    """Parse a comma-separated list of latency metrics. Raises ConfigError."""
    names = frozenset(name.strip() for name in text.split(","))
    if unknown := sorted(names - set(LATENCIES)):
        raise ConfigError(
            f"--percentile-metrics {unknown[0]}: expected some of {', '.join(LATENCIES)}"
        )
    return names


def is_good(record: Record, bounds: Mapping[str, float]) -> bool:
    times = {"ttft": ttft(record), "tpot": tpot(record) or 0.0, "e2el": e2e(record)}
    return all(times[name] <= bound for name, bound in bounds.items())


def summarise(run: LoadRun, calibration: Calibration, bounds: Mapping[str, float]) -> Summary:
    sent = [r for r in run.records if r.body_bytes]
    done = [r for r in sent if r.reply.failure is None]
    failures = [r.reply.failure for r in run.records if r.reply.failure]
    tokens = _tokens(done, calibration)
    duration = run.end - run.start
    return Summary(
        sent=len(sent),
        completed=len(done),
        failures=dict(Counter(failure.kind for failure in failures)),
        examples={failure.kind: failure.message for failure in reversed(failures)},
        duration=duration,
        images=sum(r.turn.images for r in sent),
        images_seen=sum(r.turn.seen for r in sent),
        tokens=tokens,
        throughput=_throughput(done, tokens, duration, bounds),
        latency=Latency.of(done),
        rounds=_rounds(done),
        lateness=Lateness(
            send=Distribution.of([1e3 * (r.reply.sent - r.due) for r in sent]),
            loop=Distribution.of([1e3 * delay for delay in run.loop_delays]),
        ),
        accuracy=_accuracy(done),
        outcomes=image_outcomes(r.reply.trace for r in done),
        beside=text_beside_images(done),
    )


def _tokens(records: Sequence[Record], calibration: Calibration) -> TokenTotals:
    prompt = sum(r.reply.usage.prompt or 0 for r in records)
    known = bool(records) and all(r.reply.usage.image is not None for r in records)
    vision = sum(vision_tokens(r, calibration) for r in records)
    says_cached = any(r.reply.usage.cached is not None for r in records)
    unsent = [r for r in records if r.turn.images and not r.turn.seen]
    return TokenTotals(
        prompt=prompt,
        text=prompt - vision,
        vision=vision,
        output=sum(map(output_tokens, records)),
        cached=sum(r.reply.usage.cached or 0 for r in records) if says_cached else None,
        vision_known=known,
        cached_unsent=cached_share(unsent) if says_cached and unsent else None,
    )


def cached_share(records: Sequence[Record]) -> float:
    """Return the cached fraction of all prompt tokens."""
    return sum(r.reply.usage.cached or 0 for r in records) / max(
        1, sum(r.reply.usage.prompt or 0 for r in records)
    )


def vision_tokens(record: Record, calibration: Calibration) -> int:
    """Return the vision tokens that the server reports for a request.

    If it reports none, estimate them as the prompt tokens minus the measured length of the
    questions and minus the chat's earlier answers.
    """
    usage = record.reply.usage
    if usage.image is not None:
        return usage.image
    if not record.turn.images:
        return 0
    text = calibration.tokens(record.turn.text_chars, record.round + 1) + record.prior
    return max(0, round((usage.prompt or 0) - text))


def _throughput(
    records: Sequence[Record], tokens: TokenTotals, duration: float, bounds: Mapping[str, float]
) -> Throughput:
    per_second = 1 / duration if duration else 0.0
    return Throughput(
        requests=len(records) * per_second,
        input_text=tokens.text * per_second,
        input_vision=tokens.vision * per_second,
        output=tokens.output * per_second,
        total=(tokens.prompt + tokens.output) * per_second,
        peak_output=peak_output(records),
        peak_requests=peak_requests(records),
        concurrency=sum(e2e(r) for r in records) / 1e3 * per_second,
        goodput=sum(is_good(r, bounds) for r in records) * per_second if bounds else None,
    )


def peak_output(records: Sequence[Record]) -> float:
    """Return the maximum number of output tokens in any window of one second.

    An answer's tokens are spread evenly over its events.
    """
    events = sorted(
        (at, output_tokens(r) / len(r.reply.arrivals)) for r in records for at in r.reply.arrivals
    )
    best = window = 0.0
    first = 0
    for at, tokens in events:
        window += tokens
        while events[first][0] <= at - 1.0:
            window -= events[first][1]
            first += 1
        best = max(best, window)
    return best


def peak_requests(records: Sequence[Record]) -> int:
    """Return the maximum number of requests in flight at a time."""
    edges = sorted([(r.reply.sent, 1) for r in records] + [(r.reply.done, -1) for r in records])
    best = now = 0
    for _, step in edges:
        now += step
        best = max(best, now)
    return best


def _rounds(records: Sequence[Record]) -> tuple[Round, ...]:
    """Return no rounds if no chat has a second one."""
    numbers = sorted({r.round for r in records})
    if len(numbers) < 2:
        return ()
    rounds = []
    for number in numbers:
        group = [r for r in records if r.round == number]
        prompt = sum(r.reply.usage.prompt or 0 for r in group)
        rounds.append(
            Round(
                number=number + 1,
                n=len(group),
                images=sum(r.turn.images for r in group) / len(group),
                prompt=prompt / len(group),
                cached=cached_share(group)
                if any(r.reply.usage.cached is not None for r in group)
                else None,
                ttft=Distribution.of([ttft(r) for r in group]),
                e2e=Distribution.of([e2e(r) for r in group]),
            )
        )
    return tuple(rounds)


def _accuracy(records: Sequence[Record]) -> Accuracy | None:
    scores = [says(r.reply.text, r.turn.expected) for r in records if r.turn.expected is not None]
    if not scores:
        return None
    share = sum(scores) / len(scores)
    return Accuracy(len(scores), share, float(np.sqrt(share * (1 - share) / len(scores))))


def image_outcomes(traces: Iterable[dict[str, Any] | None]) -> dict[str, int] | None:
    """Count images by the `found` value of the answers' `saccade` field. Return None if no answer
    has the field.
    """
    found = [trace for trace in traces if trace]
    if not found:
        return None
    return dict(
        Counter(
            str(image.get("found", "unknown"))
            for trace in found
            for image in trace.get("images", ())
        )
    )
