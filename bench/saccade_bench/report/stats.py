"""Grouping and comparison of runs: medians with bootstrap intervals, and ratios of two labels.

A ratio above 1 means that the second label is better (first / second for times, second / first for
rates). Its 95 % interval comes from a two-level bootstrap that resamples runs, and requests within
them (percentile method, 1,000 samples, fixed seed). With one run per label, it only covers the
variation between requests, which the report notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade_bench.load.journal import Saved

DRAWS = 1000
SERVER_AND_LOAD = (
    *("base_url", "host", "port"),
    "model",
    "seed",
    "num_prompts",
    "max_concurrency",
    "request_rate",
    "burstiness",
    "warmup_requests",
    "timeout",
)
STAGES = (
    "fetch",
    "digest",
    "prepare",
    "decode",
    "wait",
    "encode",
    "prefill",
    "generate",
    "network",
)
OUTSIDE = ("to first token", "generate")

Values = np.ndarray[tuple[int], np.dtype[np.float64]]
Statistic = Callable[[Values], float]


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """The maximum concurrency and the request rate of a run."""

    concurrency: int | None
    rate: str

    def __str__(self) -> str:
        limit = "no limit" if self.concurrency is None else f"concurrency {self.concurrency}"
        return limit if self.rate == "inf" else f"{self.rate} req/s, {limit}"


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one label at one load level, in order of time."""

    label: str
    level: LoadLevel
    runs: tuple[Saved, ...]

    def samples(self, field: str, **having: Any) -> list[Values]:
        """Return a field's values in successful requests for which all fields in `having` match.

        There is one array for each run that has any.
        """
        wanted = {"failure": None, **having}.items()
        found = [
            [r[field] for r in run.requests if wanted <= r.items() and r[field] is not None]
            for run in self.runs
        ]
        return [np.asarray(values, dtype=np.float64) for values in found if values]

    def rates(self, field: str) -> Values:
        """Return a value of `summary.throughput` for each run."""
        return np.asarray([run.summary["throughput"][field] for run in self.runs], dtype=np.float64)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [
            request for run in self.runs for request in run.requests if request["failure"] is None
        ]


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups that received the same requests."""

    name: str
    options: dict[str, Any]
    groups: tuple[Group, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.label for group in self.groups))

    @property
    def levels(self) -> tuple[LoadLevel, ...]:
        return tuple(dict.fromkeys(group.level for group in self.groups))

    def of(self, label: str, level: LoadLevel | None = None) -> Group:
        """Return the group of a label at a load level (default: its first)."""
        return next(
            group for group in self.groups if group.label == label and level in (None, group.level)
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval. The bounds are NaN if there are too few values."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of two labels. If `ratio` is above 1, the second is better."""

    metric: str
    unit: str
    first: float
    second: float
    ratio: Interval


def workloads(runs: Iterable[Saved]) -> list[Workload]:
    """Group runs by their requests, then by label and load level."""
    found: dict[str, tuple[dict[str, Any], dict[tuple[str, LoadLevel], list[Saved]]]] = {}
    for run in runs:
        asked = {name: value for name, value in run.options.items() if name not in SERVER_AND_LOAD}
        groups = found.setdefault(repr(sorted(asked.items())), (asked, {}))[1]
        level = LoadLevel(
            run.options.get("max_concurrency"), str(run.options.get("request_rate", "inf"))
        )
        groups.setdefault((run.label, level), []).append(run)
    return [
        Workload(
            describe(asked),
            asked,
            tuple(
                Group(label, level, tuple(members)) for (label, level), members in groups.items()
            ),
        )
        for asked, groups in found.values()
    ]


def describe(asked: dict[str, Any]) -> str:
    """Describe a workload for people."""
    name, count = asked["dataset_name"], asked["image_count"]
    images = (
        f"{count} picture{'s' * (count != 1)} of {asked['image_resolution']} "
        f"({asked['image_content']} {asked['image_format']})"
    )
    length = f"{asked['random_input_len']} tokens in, {asked['random_output_len']} out"
    if name in ("multiturn-image", "agent"):
        return f"{name}: {asked['rounds']} rounds, {images} in each, {length}"
    if name == "repeat":
        return (
            f"repeat: {100 * asked['repeat_ratio']:.0f} % of pictures came before, {images}, "
            f"{length}"
        )
    if name in ("mmmu", "custom"):
        return (
            f"{name}: {asked['dataset_path'] or 'from the hub'}, {asked['random_output_len']} "
            "tokens out"
        )
    if name == "random-mm":
        return f"random-mm: {asked['random_mm_bucket_config']}, {length}"
    return f"{name}: {images}, {length}"


# Intervals


def pooled(samples: Sequence[Values], statistic: Statistic) -> float:
    return float(statistic(np.concatenate(samples))) if samples else float("nan")


def interval(
    samples: Sequence[Values], statistic: Statistic = np.median, seed: int = 0
) -> Interval:
    """Return a statistic of all values together, with its interval."""
    if not samples:
        return Interval(float("nan"), float("nan"), float("nan"))
    low, high = np.percentile(list(_draws(samples, statistic, seed)), [2.5, 97.5])
    return Interval(pooled(samples, statistic), float(low), float(high))


def ratio(
    over: Sequence[Values], under: Sequence[Values], statistic: Statistic = np.median
) -> Interval:
    """Return statistic(over) / statistic(under) with its interval.

    Return NaN if either is zero or has no values (an answer with a single event has no TPOT).
    """
    if not over or not under or not pooled(over, statistic) or not pooled(under, statistic):
        return Interval(float("nan"), float("nan"), float("nan"))
    drawn = [
        a / b
        for a, b in zip(_draws(over, statistic, 1), _draws(under, statistic, 2), strict=True)
        if b
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(pooled(over, statistic) / pooled(under, statistic), float(low), float(high))


def rate_ratio(over: Values, under: Values) -> Interval:
    """Return mean(over) / mean(under), which have one value per run.

    The interval's bounds are NaN if either side has fewer than three runs.
    """
    value = float(over.mean() / under.mean()) if under.mean() else float("nan")
    if min(len(over), len(under)) < 3:
        return Interval(value, float("nan"), float("nan"))
    low, high = np.percentile(
        [a / b for a, b in zip(_resampled(over, 1), _resampled(under, 2), strict=True) if b],
        [2.5, 97.5],
    )
    return Interval(value, float(low), float(high))


def _draws(samples: Sequence[Values], statistic: Statistic, seed: int) -> Iterator[float]:
    dice = np.random.default_rng(seed)
    for _ in range(DRAWS):
        runs = [samples[i] for i in dice.integers(len(samples), size=len(samples))]
        yield statistic(
            np.concatenate(
                [values[dice.integers(len(values), size=len(values))] for values in runs]
            )
        )


def _resampled(values: Values, seed: int) -> Iterator[float]:
    dice = np.random.default_rng(seed)
    for _ in range(DRAWS):
        yield float(values[dice.integers(len(values), size=len(values))].mean())


# Comparisons


def p99(values: Values) -> float:
    return float(np.percentile(values, 99))


def compare(first: Group, second: Group) -> list[Comparison]:
    """Compare the metrics of two groups at the same load level."""
    found = []
    for metric, field, statistic in (
        ("TTFT, median", "ttft", np.median),
        ("TTFT, P99", "ttft", p99),
        ("TPOT, median", "tpot", np.median),
        ("E2E, median", "e2e", np.median),
    ):
        a, b = first.samples(field), second.samples(field)
        if a and b:
            found.append(
                Comparison(
                    metric, "ms", pooled(a, statistic), pooled(b, statistic), ratio(a, b, statistic)
                )
            )
    last = max((r["round"] for r in first.requests), default=1)
    if last > 1:
        a, b = (group.samples("ttft", round=last) for group in (first, second))
        if a and b:
            found.append(
                Comparison(
                    f"TTFT of round {last}, median",
                    "ms",
                    pooled(a, np.median),
                    pooled(b, np.median),
                    ratio(a, b),
                )
            )
    for metric, field, unit in (
        ("Requests", "requests", "req/s"),
        ("Output tokens", "output", "tok/s"),
        ("All tokens", "total", "tok/s"),
    ):
        x, y = first.rates(field), second.rates(field)
        found.append(Comparison(metric, unit, float(x.mean()), float(y.mean()), rate_ratio(y, x)))
    return found


def stage_times(requests: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean ms per request by stage. The stages add up to the request's E2E.

    The stages are STAGES if all answers have a Saccade server's trace, and otherwise OUTSIDE, which
    the client can measure.
    """
    if all("ms" in (request.get("saccade") or {}) for request in requests):
        return _means(STAGES, [split(request["saccade"], request["e2e"]) for request in requests])
    return _means(
        OUTSIDE, [(request["ttft"], request["e2e"] - request["ttft"]) for request in requests]
    )


def _means(names: Sequence[str], rows: Sequence[tuple[float, ...]]) -> dict[str, float]:
    return {
        name: float(np.mean(spent))
        for name, spent in zip(names, zip(*rows, strict=True), strict=True)
    }


def split(trace: dict[str, Any], seen: float) -> tuple[float, ...]:
    """Divide a request's `seen` ms among STAGES. Its images are processed concurrently, so that
    only the slowest one counts.

    prepare: the front end's time except for the slowest image's fetch and digest.
    prefill: from the end of encoding to the first token (earlier chunks overlap with encoding).
    network: the client's time beyond the server's own total.
    """
    prepared, first, total = (
        float(trace["ms"][moment]) for moment in ("prepared", "first_token", "total")
    )
    times = [image["ms"] for image in trace.get("images", ())]
    fetch, digest = _longest(times, ("fetch", "digest"), prepared)
    decode, wait, encode = _longest(times, ("decode", "wait", "encode"), first - prepared)
    prefill = first - prepared - decode - wait - encode
    return (
        fetch,
        digest,
        prepared - fetch - digest,
        decode,
        wait,
        encode,
        prefill,
        total - first,
        max(0.0, seen - total),
    )


def _longest(
    times: Sequence[dict[str, float]], names: tuple[str, ...], window: float
) -> list[float]:
    """Return the named stages of the slowest image, scaled down to fit into `window` ms."""
    spent = max(
        ([float(each.get(name, 0.0)) for name in names] for each in times),
        key=sum,
        default=[0.0] * len(names),
    )
    scale = min(1.0, max(0.0, window) / sum(spent)) if sum(spent) else 1.0
    return [scale * each for each in spent]
