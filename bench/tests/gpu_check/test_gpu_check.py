"""`make gpu-check` reports what it cannot do and why, keeps its budget, survives failures of its
stages, and compares each result with its reference. With tiny models, all of it runs without a GPU.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.commands import TUNING
from saccade.ipc.environment import ALLOCATION
from saccade_bench.gpu_check import __main__ as program
from saccade_bench.gpu_check import attention, ranks
from saccade_bench.gpu_check import run as runs
from saccade_bench.gpu_check.correctness import tell
from saccade_bench.gpu_check.facts import card, triton_key
from saccade_bench.gpu_check.figures import Figure, FigureFile, read_figures
from saccade_bench.gpu_check.profile_step import Span, busy_us, gaps_of
from saccade_bench.gpu_check.pytest_results import (
    UNSEEN,
    Results,
    pytest_collection_modifyitems,
    read_results,
)
from saccade_bench.gpu_check.report import COMMAND, judge, write_report
from saccade_bench.gpu_check.run import OUTCOMES, Outcome, StageRunner
from saccade_bench.gpu_check.serving import (
    HOST_TIERS,
    QUICK,
    beside_figures,
    count_steps,
    ttft_by_round,
)
from saccade_bench.gpu_check.speeds import fastest
from saccade_bench.gpu_check.stages import COMMANDS, STAGES, Stage
from saccade_bench.gpu_check.targets import COPY, H200, PRODUCTS, RULES, TARGETS
from tests.fixtures.tiny import tinies

DRY = ("--device", "cpu", "--quick")
FACTS = {
    "command": "x",
    "when": "now",
    "seconds": 1.0,
    "quick": False,
    "hardware": {"gpu": "NVIDIA H200"},
    "versions": {"torch": "2.11", "cuda": None},
}


def test_without_a_gpu_it_says_so_before_the_other_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If torch did not report in time whether there is a GPU, the other stages are tried."""

    def run(self: StageRunner, stage: Stage) -> Outcome:
        if seen[-1] is not None:
            (self.out / "facts.json").write_text(json.dumps({"cuda": seen[-1]}))
        self.outcomes.append(Outcome(stage.name, "", "ok"))
        return self.outcomes[-1]

    monkeypatch.setattr(StageRunner, "run", run)
    monkeypatch.setattr(StageRunner, "lacks", lambda self, stage: [])
    words = ["--command", "a", "--only", "facts", "speeds", "--out", str(tmp_path / "out")]
    seen: list[bool | None] = [False]
    assert program.main(words) == 2
    said = capsys.readouterr().out
    assert "torch sees no CUDA device" in said and "== speeds" not in said
    for each in (None, True):
        seen.append(each)
        assert program.main(words) == 0
        assert "== speeds" in capsys.readouterr().out


def test_facts_name_what_a_cache_of_kernels_must_have_been_made_by() -> None:
    assert card()["cuda"] == torch.cuda.is_available()
    assert not find_spec("triton") or len(triton_key()["triton key"]) == 64


def test_what_is_not_installed_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = [replace(stage, needs=(*stage.needs, "no_such_module")) for stage in STAGES]
    monkeypatch.setattr(program, "STAGES", lacking)
    assert program.main(["--out", str(tmp_path), *DRY]) == 2
    said = capsys.readouterr().out
    assert "tower cannot run: not installed: no-such-module" in said
    assert "gpu_check.plan --prepare" in said


def test_what_finds_no_time_is_skipped_and_said_to_be(tmp_path: Path) -> None:
    assert program.main(["--out", str(tmp_path), *DRY, "--budget", "1"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["skipped"]) == [stage.name for stage in STAGES]
    assert all("of the budget are left" in why for why in summary["skipped"].values())
    assert summary["versions"]["torch"] == version("torch")
    assert summary["hardware"]["cpu cores"] > 0
    assert "| tower | skipped |" in (tmp_path / "report.md").read_text()


# ---- stages


Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a stage with this Python code, which can write to `figures`."""
    (tmp_path / "staged").mkdir()
    path = f"{tmp_path}{':'.join(['', *sys.path])}"
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(runs, "PACKAGE", "staged")
    monkeypatch.setattr(runs, "END_SECONDS", 0.3)

    def carry_out(
        code: str, limit: float = 60.0, runner: StageRunner | None = None, name: str = "work"
    ) -> Outcome:
        head = """
            import os, signal, subprocess, sys, tempfile, time
            from pathlib import Path
            from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
            args = stage_arguments("")
            figures = FigureFile(args.figures)
            """
        whole = textwrap.dedent(head) + textwrap.dedent(code)
        (tmp_path / "staged" / "work.py").write_text(whole)
        runner = runner or StageRunner(tmp_path, device="cpu", quick=True, budget=100.0)
        return runner.run(Stage(name, "work", "tests", (), 0.0, limit))

    return carry_out


ONE = "figures.add(Figure('speed', 2.0, 'tok/s', more=True))\n"


@pytest.mark.parametrize(
    ("end", "status", "why"),
    [
        ("", "ok", ""),
        ("sys.exit(3)", "failed", "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "failed", "ended by SIGSEGV"),
    ],
)
def test_a_stage_keeps_what_it_found_whatever_becomes_of_it(
    run: Run, end: str, status: str, why: str
) -> None:
    outcome = run(f"{ONE}{end}")
    assert (outcome.status, outcome.why) == (status, why)
    assert outcome.figures == [Figure("speed", 2.0, "tok/s", more=True)]
    assert "speed: 2 tok/s" in outcome.tail


def test_a_stage_that_takes_too_long_is_ended_with_all_it_started(run: Run, tmp_path: Path) -> None:
    """Neither the stage nor its child process reacts to SIGTERM."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    outcome = run(
        f"""
{ONE}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {deaf!r} + "time.sleep(60)"])
Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
Path({str(tmp_path / "folder")!r}).write_text(tempfile.mkdtemp())
time.sleep(60)
""",
        limit=3.0,
    )
    assert not Path((tmp_path / "folder").read_text()).exists()
    assert outcome.status == "timed out" and outcome.seconds < 30
    assert [figure.metric for figure in outcome.figures] == ["speed"]
    child = Path("/proc") / (tmp_path / "child").read_text()
    until = time.monotonic() + 10.0
    while child.exists() and "Z (zombie)" not in (child / "status").read_text():
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.05)


def test_stages_after_one_that_failed_run(run: Run, tmp_path: Path) -> None:
    runner = StageRunner(tmp_path, device="cpu", quick=True, budget=100.0)
    run("print('last words', flush=True); os.abort()", runner=runner)
    assert run(ONE, runner=runner, name="next").status == "ok"
    write_report(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failed"] == {"work": "ended by SIGABRT"}
    report = (tmp_path / "report.md").read_text()
    assert re.search(r"\| work \| failed \| \d+ \| ended by SIGABRT \|", report)
    assert "last words" in report


def test_a_figure_that_cannot_be_had_stops_no_other(tmp_path: Path) -> None:
    file = FigureFile(tmp_path / "figures.jsonl")

    def fail() -> Figure:
        raise RuntimeError("CUDA error: misaligned address\nand more")

    file.attempt("cudnn", fail, unit="ms", optional=True)
    assert file.failures == 0
    assert not file.attempt("ours", fail, unit="ms") and file.failures == 1
    assert file.attempt("next", lambda: Figure("next", 1.0, "ms"))
    with (tmp_path / "figures.jsonl").open("a") as out:
        out.write('{"metric": "cut off wh')  # the process ended here
    found = read_figures(tmp_path / "figures.jsonl")
    assert [figure.value for figure in found] == [None, None, 1.0]
    assert found[0].error == "RuntimeError: CUDA error: misaligned address"


# ---- the report


def report_of(tmp_path: Path, figures: Sequence[Figure], **facts: Any) -> str:
    (tmp_path / COMMAND).write_text(json.dumps(FACTS | facts))
    (tmp_path / OUTCOMES).write_text(f"{json.dumps(asdict(Outcome('speed', 'x', 'ok')))}\n")
    (tmp_path / "speed.figures.jsonl").unlink(missing_ok=True)
    file = FigureFile(tmp_path / "speed.figures.jsonl")
    for figure in figures:
        file.add(figure)
    write_report(tmp_path)
    return (tmp_path / "report.md").read_text()


def test_a_figure_stands_beside_its_floor_what_is_published_and_its_target(
    tmp_path: Path,
) -> None:
    slow = Figure("decode, qwen3-vl-8b, batch 64", 2800.0, "tok/s", more=True)
    quick = Figure("chat at 1440p, TTFT of round 8", 248.0, "ms")
    report = report_of(tmp_path, [slow, quick])
    assert "| 2,800 tok/s | 11,100 | **25 %** |  |  | 9,990 | **no** |" in report
    assert "| 248 ms | 310 | 125 % | 2,172 | 876 % | 350 | yes |" in report
    summary = json.loads((tmp_path / "summary.json").read_text())
    first, second = summary["stages"][0]["figures"]
    assert first["of_floor"] == pytest.approx(2800 / 11_100) and first["advice"].startswith(
        "Read `profile` at batch 64"
    )
    assert f"- **{slow.metric}**: {first['advice']}" in report
    assert second["advice"] == "" and second["of_target"] == pytest.approx(350 / 248)


def test_another_gpus_figures_are_held_against_their_own_floors_alone(tmp_path: Path) -> None:
    figure = Figure("decode, qwen3-vl-8b, batch 64", 100.0, "tok/s", more=True, floor=1000.0)
    report = report_of(tmp_path, [figure], hardware={"gpu": "NVIDIA L4"})
    assert "| 100 tok/s | 1,000 | **10 %** |  |  |  |  |" in report
    assert "What to try next" in report
    nothing = report_of(tmp_path, [figure], hardware={"cpu": "some"})
    assert "What to try next" not in nothing and "the figures mean nothing" in nothing


def test_floors_and_targets_go_by_what_the_machine_was_measured_to_do(tmp_path: Path) -> None:
    """Published results are of the GPU that they were measured on, and do not scale."""
    speeds = [Figure(COPY, 2150.0, "GB/s"), Figure(PRODUCTS, 790.0, "TFLOP/s")]
    decode = Figure("decode, qwen3-vl-8b, batch 64", 2800.0, "tok/s", more=True)
    prefill = Figure("prefill, qwen3-vl-8b, chunks of 8192", 42_000.0, "tok/s", more=True)
    card = {"gpu": "NVIDIA H100 80GB HBM3"}
    report = report_of(tmp_path, [*speeds, decode, prefill], hardware=card)
    assert "| 2,800 tok/s | 5,550 | **50 %** |  |  | 4,995 | **no** |" in report
    assert "| 42,000 tok/s | 48,500 | 87 % |  |  | 43,600 | **no** |" in report
    assert "those of 2.15 TB/s and 790 TFLOP/s" in report
    assumed = report_of(tmp_path, [decode], hardware=card)
    assert "| 2,800 tok/s | 7,744 |" in assumed


def test_the_fastest_way_to_move_bytes_is_the_machines_speed(tmp_path: Path) -> None:
    """A copy in a graph may be slower than a kernel. A method that fails is named, and does not
    stop the others.
    """

    def fail() -> Figure:
        raise RuntimeError("no kernel")

    file = FigureFile(tmp_path / "figures.jsonl")
    ways = {"copy, in a graph": 2768.0, "read": 4300.0}
    known = {name: partial(Figure, "", value, "GB/s", more=True) for name, value in ways.items()}
    fastest(file, COPY, known | {"broken": fail})
    found = {figure.metric: figure for figure in read_figures(tmp_path / "figures.jsonl")}
    assert {name: found[name].value for name in ways} == ways
    assert found[COPY].value == 4300.0 and found[COPY].note.startswith("read")
    assert found["broken"].value is None and file.failures == 1


def test_stages_are_told_the_measured_speeds_and_have_a_servers_allocator(
    run: Run, tmp_path: Path
) -> None:
    runner = StageRunner(tmp_path, device="cpu", quick=True, budget=100.0)
    said = "print(args.copy, args.products, os.environ['PYTORCH_ALLOC_CONF'])\n"
    assert f"{H200.copy} {H200.products} {ALLOCATION}" in run(said, runner=runner).tail
    run(
        f"figures.add(Figure({COPY!r}, 2.0, 'GB/s'))\n"
        f"figures.add(Figure({PRODUCTS!r}, 3.0, 'TFLOP/s'))\n",
        runner=runner,
    )
    assert f"2000000000.0 3000000000000.0 {ALLOCATION}" in run(said, runner=runner).tail


def test_the_stages_own_floor_comes_before_the_tables() -> None:
    figure = Figure("decode, qwen3-vl-8b, batch 1", 140.0, "tok/s", more=True, floor=280.0)
    assert judge(figure, H200).of_floor == 0.5
    failed = replace(figure, value=None, error="why")
    assert judge(failed, H200).of_floor is None and not judge(failed, H200).advice


def test_every_stage_has_a_module() -> None:
    for stage in STAGES:
        assert find_spec(f"{runs.PACKAGE}.{stage.module}"), stage.name


def test_every_target_has_advice() -> None:
    for target in TARGETS:
        assert any(fnmatchcase(target.metric, rule.metric) for rule in RULES), target.metric


# ---- how stages interpret their measurements


def test_time_is_busy_once_and_gaps_are_named_by_what_ends_them() -> None:
    spans = [Span("b", 5, 9), Span("a", 0, 4), Span("side", 6, 7), Span("b", 12, 13)]
    assert busy_us(spans) == 9.0
    assert gaps_of(spans) == {"b": [1.0, 3.0]}


def test_a_failed_request_is_no_round() -> None:
    asked = [{"round": n, "ttft": ttft} for n, ttft in ((2, 7.0), (1, 3.0), (1, 2.0))]
    assert ttft_by_round(asked) == [2.0, 7.0]
    with pytest.raises(RuntimeError, match="round 2 failed"):
        ttft_by_round([*asked, {"round": 2, "failure": "timeout"}])


def test_gaps_beside_images_are_counted_in_steps() -> None:
    alone = {"n": 9, "median": 5.0}
    images = {"n": 4, "p99": 12.5, "max": 13.0}
    figures = beside_figures({"alone": alone, "images": images}, QUICK)
    assert [figure.value for figure in figures] == [5.0, 12.5, 2.5]
    at_once = beside_figures({"alone": alone | {"median": 0.0}, "images": images}, QUICK)
    assert [figure.value for figure in at_once] == [12.5]
    with pytest.raises(RuntimeError, match="no token came"):
        beside_figures({"alone": alone, "images": {"n": 0}}, QUICK)


@pytest.mark.parametrize("cuda", [True, False])
def test_where_there_is_a_gpu_a_run_without_a_test_has_failed(tmp_path: Path, cuda: bool) -> None:
    file = FigureFile(tmp_path / "figures.jsonl")
    tell(Results(outcomes={"skipped": 7}), file, done=True, cuda=cuda)
    (figure,) = read_figures(tmp_path / "figures.jsonl")
    assert file.failures == cuda and (figure.value is None) == cuda
    assert "7 skipped" in (figure.error if cuda else figure.note)


def test_the_servers_host_memory_is_bounded_by_values_that_it_has() -> None:
    """A tiny server does not set them."""
    for word in HOST_TIERS[1::2]:
        name, value = word.split("=")
        assert TUNING[name].parse(value) == int(value)
    assert {word.split("=")[0] for word in HOST_TIERS[1::2]} == {
        "embedding_cache_host_mb",
        "kv_cache_host_mb",
    }


def test_replays_of_every_size_are_counted() -> None:
    lines = [
        "# TYPE saccade_steps_total counter",
        "saccade_steps_total 20.0",
        'saccade_graph_replays_total{rows="8"} 9.0',
        'saccade_graph_replays_total{rows="1"} 3',
        'saccade_mixed_graph_replays_total{tokens="64"} 2.0',
        "saccade_steps_totally 7",
    ]
    assert count_steps("\n".join(lines)) == (14.0, 20.0)


def test_two_ranks_are_skipped_by_name_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tmp_path / "figures.jsonl"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["ranks", "--figures", str(figures), "--device", "cuda"])
    assert ranks.main() == 0
    (figure,) = read_figures(figures)
    assert figure.value == 1 and "two ranks need two GPUs" in figure.note and not figure.error


def test_ranks_are_compared_by_the_tokens_that_both_find_likely() -> None:
    one = ranks.Seen(({"a": -1.0, "b": -2.0}, {"c": -1.0}), 1.0, (3.0, 4.0))
    other = replace(one, likely=({"b": -2.25, "d": -1.0}, {"c": -1.125}))
    assert ranks.difference(one, other) == 0.25
    assert [each.value for each in ranks.figures("x", one, other)] == [0.25, 1.0, 75.0]
    with pytest.raises(ArithmeticError, match="likely to both"):
        ranks.difference(one, replace(one, likely=({"z": -1.0}, {"c": -1.0})))


def test_flash_attention_is_held_against_the_best_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([8.0, 2.0, 6.0])
    monkeypatch.setattr(attention, "device_ms", lambda *_: next(times))
    figures = tmp_path / "figures.jsonl"
    file = FigureFile(figures)
    bench = attention.Bench(torch.device("cpu"), torch.float32, file, True, 1.0, 1.0)
    ways = {name: [lambda: torch.ones(2)] for name in ("torch flash", "fa3", "triton 64x64")}
    attention.compare(bench, "tower", ways, 1.0)
    found = {each.metric: each.value for each in read_figures(figures)}
    assert found["tower, fa3 beside ours"] == 3.0 and found["tower, best"] == 2.0


def test_families_that_no_gpu_has_run_are_tested_first() -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

    assert {*UNSEEN} <= {*tinies()}
    items = [Item(f"t.py::test[{name}]") for name in ("qwen3_vl", "step3_vl", "gemma3", "glm_ocr")]
    pytest_collection_modifyitems(None, items)
    names = [each.nodeid[11:-1] for each in items]
    assert names == ["step3_vl", "glm_ocr", "qwen3_vl", "gemma3"]


def test_failed_tests_are_named(tmp_path: Path) -> None:
    """The run was stopped while it wrote a line."""
    lines = [
        {"test": "a", "outcome": "started"},
        {"test": "b", "outcome": "started"},
        {"test": "b", "outcome": "CUDA error", "said": "CUDA error: misaligned address"},
        {"test": "c", "outcome": "started"},
        {"test": "b", "outcome": "failed", "said": "worker 'gw1' crashed"},
        {"test": "d", "outcome": "failed", "said": "x = 1\nE   AssertionError: not close\n"},
        {"test": "d", "outcome": "passed"},
        {"test": "c", "outcome": "passed"},
    ]
    whole = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "tests.jsonl").write_text(f'{whole}{{"test": "e", "outc')
    found = read_results(tmp_path / "tests.jsonl")
    assert found.outcomes == {"failed": 1, "CUDA error": 1, "passed": 1}
    assert [*found.bad] == ["b", "d"] and found.broken == ["b"] and found.unfinished == ["a"]
    file = FigureFile(tmp_path / "figures.jsonl")
    tell(found, file, done=False, cuda=True)
    (figure,) = read_figures(tmp_path / "figures.jsonl")
    assert figure.value == 2 and file.failures
    assert "b: CUDA error: misaligned address; d: AssertionError: not close" in figure.note
    assert "1 under way" in figure.note


def test_what_failed_before_runs_again_first_by_the_speeds_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unfinished tests run again too. If the summary was not returned, no test counts as failed."""
    speed = {"metric": COPY, "value": 2150.0}
    summary = {
        "tests": {"bad": {"tests/x.py::test_a[1]": "why"}, "unfinished": ["tests/x.py::test_b"]},
        "stages": [{"figures": [speed, {"metric": "start", "value": 1.0}]}],
    }
    before = tmp_path / "a.json"
    before.write_text(json.dumps(summary))
    begun: list[tuple[Stage, list[str]]] = []

    def run(self: StageRunner, stage: Stage) -> Outcome:
        command = self._command(stage, tmp_path / "figures", 1.0)
        begun.append((stage, command))
        if "--tests" in stage.options:
            again = Path(stage.options[-1]).read_text().splitlines()
            assert again == ["tests/x.py::test_a[1]", "tests/x.py::test_b"]
        self.outcomes.append(Outcome(stage.name, "", "ok"))
        return self.outcomes[-1]

    monkeypatch.setattr(StageRunner, "run", run)
    words = ["--command", "b", "--out", str(tmp_path / "out"), *DRY]
    assert program.main([*words, "--after", str(before)]) == 0
    names = [stage.name for stage in COMMANDS["b"].stages]
    assert [stage.name for stage, _ in begun] == ["again", *names]
    assert all("2150000000000.0" in command for _, command in begun)
    begun.clear()
    assert program.main([*words, "--after", str(tmp_path / "lost.json")]) == 0
    assert [stage.name for stage, _ in begun] == names
    assert "as if nothing had failed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_stage_runs_on_tiny_models(tmp_path: Path) -> None:
    longer = ("--limit", "200", "--budget", "1700")
    status = program.main(["--out", str(tmp_path), *DRY, *longer])
    summary = json.loads((tmp_path / "summary.json").read_text())
    stages = {stage["name"]: stage for stage in summary["stages"]}
    assert {name: stage["status"] for name, stage in stages.items()} == dict.fromkeys(
        (stage.name for stage in STAGES), "ok"
    )
    assert status == 0
    found = {figure["metric"]: figure for s in stages.values() for figure in s["figures"]}
    assert all(figure["error"] == "" for figure in found.values())
    assert {
        "tests failed",
        "decode, tiny-qwen3-vl, batch 2",
        "prefill, tiny-qwen3-vl, chunks of 64",
        "tower, tiny-qwen3-vl, 96p, best",
        "chat at 96p, TTFT of round 2",
        "ITL P99 beside images, in decode steps",
        "probe at 96p, images in one request",
        "tower attention, 48 rows, best",
        "profile, tiny-qwen3-vl, 4 layers, batch 2, kernels a step",
        "chat at 96p, no caches, TTFT of round 2",
        "new images at 64p, 2 at a time",
        "tiny-qwen3-vl, 2 ranks, gloo, log-probabilities differ",
        "tiny-qwen3-vl, 2 ranks, shm, a token",
        "ITL P99 beside images, whole chunks of 64",
        "profile, tiny-qwen3-vl-fp8, 4 layers, batch 1, kernels a step",
        "profile, tower, tiny-qwen3-vl, 96p, sdpa, kernels a step",
        "transformers, tiny-qwen3-vl, one new image at 96p, TTFT",
    } <= set(found)
    assert found["probe at 96p, images in one request"]["value"] == 2
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert {"profile.md", "report.md", "tests.jsonl"} <= set(archive.getnames())
    assert len(list(tmp_path.iterdir())) <= 8
