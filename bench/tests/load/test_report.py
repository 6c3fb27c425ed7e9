from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.core.errors import ConfigError
from saccade_bench.eval.contract import EvalResult
from saccade_bench.load.journal import Saved, read_evals, read_runs, write_eval
from saccade_bench.load.serve import Bench, serve
from saccade_bench.options import (
    DatasetOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    RandomMM,
    ReportOptions,
    TargetOptions,
    TextOptions,
)
from saccade_bench.report.page import phrase
from saccade_bench.report.report import interleaved, report
from saccade_bench.report.stats import (
    Comparison,
    Group,
    Interval,
    LoadLevel,
    compare,
    interval,
    rate_ratio,
    ratio,
    stage_times,
    workloads,
)
from tests.tools.server import Script, ScriptedServer, scripted

TIMES = (
    {"fetch": 0.0, "digest": 1.0, "decode": 2.0, "wait": 1.0, "encode": 3.0},
    {"fetch": 0.0, "digest": 2.0, "decode": 8.0, "wait": 4.0, "encode": 6.0},
)
TRACE = {
    "images": [{"found": "none", "ms": times} for times in TIMES],
    "ms": {"prepared": 5.0, "first_token": 30.0, "total": 40.0},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure two labels alternately, three times each: chats of three rounds, and single requests
    at two concurrencies, one of them with traces and one with failures.
    """
    path = tmp_path_factory.mktemp("results") / "runs.jsonl"
    with (
        scripted(first=0.03, between=0.004, trace=TRACE) as slow,
        scripted(first=0.001, between=0.002) as fast,
    ):
        for seed in range(3):
            for label, server in (("slow", slow), ("fast", fast)):
                measure(
                    server,
                    label,
                    path,
                    seed,
                    DatasetOptions(dataset_name="multiturn-image", rounds=3),
                    1,
                )
        for concurrency in (1, 2):
            for label, server in (("slow", slow), ("fast", fast)):
                measure(
                    server, label, path, 9, DatasetOptions(dataset_name="random-mm"), concurrency
                )
        fast.script = Script(between=0.002, refuse=lambda number, body: 500 if number % 2 else None)
        measure(fast, "fast", path, 10, DatasetOptions(dataset_name="random-mm"), 2)
    write_eval(path, "fast", EvalResult("ocr", 50, 0.9, 0.04))
    return path


@pytest.fixture(scope="module")
def made(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a report of the results."""
    return report([results], ReportOptions(output=tmp_path_factory.mktemp("report")))


def measure(
    server: ScriptedServer,
    label: str,
    path: Path,
    seed: int,
    data: DatasetOptions,
    concurrency: int,
) -> None:
    serve(
        Bench(
            TargetOptions(base_url=server.url),
            LoadOptions(num_prompts=4, max_concurrency=concurrency, warmup_requests=0, seed=seed),
            data,
            ImageOptions(image_resolution="32x32", image_content="blank"),
            TextOptions(random_input_len=10, random_output_len=3),
            RandomMM(2, 1.0, random_mm_bucket_config="{(32, 32, 1): 1}"),
            OutputOptions(quiet=True, output_file=path, label=label),
        )
    )


class Page(HTMLParser):
    """The URLs that a browser would fetch, and the text that it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.shown: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.shown.append(data)


def test_the_page_needs_nothing_beside_it(made: Path) -> None:
    text = made.read_text()
    page = Page(text)
    assert page.open == []
    assert page.fetched and all(url.startswith("data:image/png;base64,") for url in page.fetched)
    assert not re.search(r"url\(|@import|<script|<link", text)


def test_the_plots_lie_beside_the_page_as_pngs(made: Path) -> None:
    names = sorted(path.name for path in made.parent.glob("*.png"))
    assert names == [
        "1-distributions.png",
        "1-stages.png",
        "1-ttft-by-round.png",
        "2-concurrency.png",
        "2-distributions.png",
        "2-stages.png",
    ]
    for name in names:
        with Image.open(io.BytesIO((made.parent / name).read_bytes())) as image:
            assert image.format == "PNG" and image.width >= 900


def test_the_headline_stands_on_top_and_failures_are_not_hidden(made: Path) -> None:
    shown = " ".join(" ".join(Page(made.read_text()).shown).split())
    first = shown.index("fast against slow: TPOT")
    assert (
        first
        < shown.index("fast scores 0.900 ± 0.040 in ocr (n = 50).")
        < shown.index("slow beside fast, concurrency 1")
    )
    assert "TTFT of round 3, median" in shown
    assert "fast: 2 × HTTP 500. Its figures are of the answered requests only." in shown
    assert "3 and 3 runs, interleaved." in shown
    assert "1 and 1 runs: intervals cover the spread between requests, not between runs." in shown


def test_runs_are_grouped_by_what_was_asked_and_how_hard(results: Path) -> None:
    chats, singles = workloads(read_runs(results))
    assert (
        chats.name
        == "multiturn-image: 3 rounds, 1 picture of 32x32 (blank jpeg) in each, 10 tokens in, 3 out"
    )
    assert [(group.label, str(group.level), len(group.runs)) for group in chats.groups] == [
        ("slow", "concurrency 1", 3),
        ("fast", "concurrency 1", 3),
    ]
    assert [(group.label, str(group.level), len(group.runs)) for group in singles.groups] == [
        ("slow", "concurrency 1", 1),
        ("fast", "concurrency 1", 1),
        ("slow", "concurrency 2", 1),
        ("fast", "concurrency 2", 2),
    ]
    assert [len(values) for values in chats.of("slow").samples("ttft")] == [12, 12, 12]
    assert [len(values) for values in chats.of("slow").samples("ttft", round=2)] == [4, 4, 4]


def test_a_faster_server_is_found_faster(results: Path) -> None:
    chats, _ = workloads(read_runs(results))
    rows = {row.metric: row for row in compare(chats.of("slow"), chats.of("fast"))}
    assert rows["TTFT, median"].ratio.low > 1
    assert rows["TTFT, median"].ratio.value == pytest.approx(
        rows["TTFT, median"].first / rows["TTFT, median"].second
    )
    assert rows["Requests"].ratio.value == pytest.approx(
        rows["Requests"].second / rows["Requests"].first
    )
    back = {row.metric: row for row in compare(chats.of("fast"), chats.of("slow"))}
    assert back["TTFT, median"].ratio.high < 1


def test_a_server_beside_itself_shows_no_difference() -> None:
    dice = np.random.default_rng(0)
    samples = [dice.normal(100, 10, size=50) for _ in range(6)]
    same = ratio(samples[::2], samples[1::2])
    assert same.low < 1 < same.high
    assert phrase(Comparison("TTFT", "ms", 100.0, 101.0, same)).startswith(
        "TTFT: no difference shown"
    )


@pytest.mark.slow
def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Intervals are for 95 % of medians of 40 normal values. Of 100 intervals, between 88 and 100
    should contain the true median.
    """
    dice = np.random.default_rng(1)
    hits = 0
    for seed in range(100):
        found = interval([dice.normal(5.0, 1.0, size=40)], seed=seed)
        hits += found.low <= 5.0 <= found.high
    assert 88 <= hits <= 100


def test_runs_that_differ_widen_the_interval_more_than_requests_do() -> None:
    dice = np.random.default_rng(2)
    steady = interval([dice.normal(100, 5, size=40) for _ in range(4)])
    drifting = interval([dice.normal(centre, 5, size=40) for centre in (80, 95, 105, 120)])
    assert drifting.high - drifting.low > 3 * (steady.high - steady.low)


def test_rates_have_an_interval_only_from_three_runs_on() -> None:
    few = rate_ratio(np.asarray([2.0, 2.2]), np.asarray([1.0, 1.1]))
    assert few.value == pytest.approx(2.0) and math.isnan(few.low)
    many = rate_ratio(np.asarray([2.0, 2.2, 2.1]), np.asarray([1.0, 1.1, 1.05]))
    assert many.low < many.value < many.high


@pytest.mark.parametrize(
    ("ratio_", "text"),
    [
        (Interval(2.0, 1.5, 2.5), "TTFT 2.00 × better (50.0 → 25.0 ms)"),
        (Interval(0.5, 0.4, 0.6), "TTFT 2.00 × worse (50.0 → 25.0 ms)"),
        (Interval(1.1, 0.9, 1.3), "TTFT: no difference shown (50.0 → 25.0 ms)"),
        (Interval(2.0, math.nan, math.nan), "TTFT 2.00 × better (50.0 → 25.0 ms)"),
        (Interval(math.nan, math.nan, math.nan), "TTFT: not comparable (50.0 → 25.0 ms)"),
    ],
)
def test_a_difference_is_claimed_only_where_the_interval_shows_it(
    ratio_: Interval, text: str
) -> None:
    assert phrase(Comparison("TTFT", "ms", 50.0, 25.0, ratio_)) == text


def test_time_is_split_as_the_server_reports_it_along_the_picture_that_took_longest() -> None:
    traced = [{"ttft": 33.0, "e2e": 42.5, "saccade": TRACE}] * 2
    split = stage_times(traced)
    assert split == {
        "fetch": 0.0,
        "digest": 2.0,
        "prepare": 3.0,
        "decode": 8.0,
        "wait": 4.0,
        "encode": 6.0,
        "prefill": 7.0,
        "generate": 10.0,
        "network": 2.5,
    }
    assert sum(split.values()) == 42.5


def test_without_a_trace_time_is_split_as_seen_from_outside() -> None:
    assert stage_times([{"ttft": 60.0, "e2e": 70.0}, {"ttft": 40.0, "e2e": 70.0}]) == {
        "to first token": 50.0,
        "generate": 20.0,
    }


def test_a_picture_cannot_take_longer_than_the_request_it_is_in() -> None:
    """For an image whose encoding another request started, the trace may report more time than this
    request waited.
    """
    trace = {
        "images": [{"ms": {"decode": 30.0, "encode": 70.0}}],
        "ms": {"prepared": 1.0, "first_token": 11.0, "total": 11.0},
    }
    split = stage_times([{"ttft": 11.0, "e2e": 11.0, "saccade": trace}])
    assert (split["decode"], split["encode"], split["prefill"]) == (
        pytest.approx(3.0),
        pytest.approx(7.0),
        pytest.approx(0.0),
    )


def run_of(label: str, started: float) -> Saved:
    return Saved(f"{label}{started}", label, started, {}, (), {})


def test_turns_are_told_from_one_after_the_other() -> None:
    level = LoadLevel(1, "inf")
    a = Group("a", level, tuple(run_of("a", at) for at in (0.0, 2.0, 4.0)))
    turns = Group("b", level, tuple(run_of("b", at) for at in (1.0, 3.0, 5.0)))
    after = Group("b", level, tuple(run_of("b", at) for at in (6.0, 7.0, 8.0)))
    assert interleaved(a, turns)
    assert not interleaved(a, after)


def test_the_baseline_is_the_label_asked_for(results: Path, tmp_path: Path) -> None:
    shown = " ".join(
        Page(
            report(
                [results], ReportOptions(output=tmp_path, baseline="fast", title="My title")
            ).read_text()
        ).shown
    )
    assert "slow against fast" in shown and "fast against slow" not in shown and "My title" in shown
    with pytest.raises(
        ConfigError, match="--baseline other: no run has this label; there are slow, fast"
    ):
        report([results], ReportOptions(output=tmp_path, baseline="other"))


def test_a_single_label_gets_its_own_headline(results: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.jsonl"
    lines = results.read_text().splitlines()
    ids = {run.id for run in read_runs(results) if run.label == "slow"}
    alone.write_text("\n".join(line for line in lines if any(name in line for name in ids)))
    shown = " ".join(Page(report([alone], ReportOptions(output=tmp_path / "r")).read_text()).shown)
    assert (
        "slow (multiturn-image: 3 rounds" in shown
        and "better" not in shown.split("How to read this")[0]
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        '{"no": "kind"}',
        '{"kind": "run", "run": "x", "label": "l", "started": 0, "options": {}}',
    ],
)
def test_a_file_that_is_no_whole_result_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        report([path], ReportOptions(output=tmp_path))
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        report([tmp_path / "missing.jsonl"], ReportOptions(output=tmp_path))


def test_accuracy_runs_are_read_back(results: Path) -> None:
    (saved,) = read_evals(results)
    assert (saved.label, saved.result["n"], saved.result["score"]) == ("fast", 50, 0.9)
