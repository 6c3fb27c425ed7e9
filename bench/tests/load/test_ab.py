"""Two servers as real processes: they are started, measured and stopped."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from saccade.core.errors import ConfigError
from saccade_bench.ab import Verdict, ab
from saccade_bench.load.journal import read_evals, read_runs
from saccade_bench.load.serve import Bench
from saccade_bench.options import AbOptions, ImageOptions, LoadOptions, OutputOptions, TextOptions

PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
import uvicorn
from tests.tools.server import Script, ScriptedServer
server = ScriptedServer(Script(first={first}, answer=lambda body: [{answer!r}]))
server._server.config.port = int(sys.argv[1])
server._server.run()
"""
ROOT = str(Path(__file__).parents[3])


def command(tmp_path: Path, name: str, first: float, answer: str = "no idea") -> str:
    program = tmp_path / f"{name}.py"
    program.write_text(PROGRAM.format(root=ROOT, first=first, answer=answer))
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(program))} {{port}}"


def run(a: str, b: str, path: Path, **options: object) -> Verdict:
    bench = Bench(
        load=LoadOptions(num_prompts=4, max_concurrency=2, warmup_requests=0),
        images=ImageOptions(image_resolution="32x32", image_content="blank"),
        text=TextOptions(random_input_len=10, random_output_len=3),
        output=OutputOptions(quiet=True, output_file=path),
    )
    return ab(AbOptions(a, b, start_timeout=60, eval_prompts=4, **options), bench)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep_running", [False, True])
def test_the_verdict_says_speed_and_accuracy(tmp_path: Path, keep_running: bool) -> None:
    path = tmp_path / "ab.jsonl"
    slow, fast = command(tmp_path, "slow", 0.1), command(tmp_path, "fast", 0.0)
    verdict = run(
        slow, fast, path, repeats=2, label_a="slow", label_b="fast", keep_running=keep_running
    )
    assert [saved.label for saved in read_runs(path)] == ["slow", "fast", "slow", "fast"]
    assert [saved.options["seed"] for saved in read_runs(path)] == [1, 1, 2, 2]
    assert [saved.label for saved in read_evals(path)] == ["slow", "fast"]
    ttft = next(row for row in verdict.speed if row.metric == "TTFT, median")
    assert ttft.ratio.value > 1  # "slow" waits 100 ms more
    assert verdict.accuracy is not None and verdict.accuracy.equal and verdict.accuracy.same == 4
    warning, speed, accuracy = verdict.lines("slow", "fast")
    assert warning.startswith("WARNING: 2 runs of 4 requests: what follows may be chance")
    enough = replace(verdict, runs=3, requests=20).lines("slow", "fast")
    assert enough == [speed, accuracy]
    assert re.match(
        r"Speed, fast against slow: TTFT, median(: no difference shown| [0-9.]+ × better) "
        r"\([0-9.]+ → [0-9.]+ ms\);",  # under load, a few requests prove nothing
        speed,
    )
    assert (
        accuracy
        == "Accuracy: slow 0.000 ± 0.000, fast 0.000 ± 0.000 (ocr, n = 4): no difference shown; 4 "
        "of 4 answers are the same text."
    )
    assert not [
        process
        for process in psutil.Process().children()
        if "slow.py" in " ".join(process.cmdline())
    ]


def test_answers_that_differ_are_counted(tmp_path: Path) -> None:
    verdict = run(
        command(tmp_path, "a", 0.0),
        command(tmp_path, "b", 0.0, "another"),
        tmp_path / "ab.jsonl",
        repeats=1,
    )
    assert verdict.accuracy is not None and verdict.accuracy.same == 0


def test_a_server_that_does_not_start_is_named_with_what_it_said(tmp_path: Path) -> None:
    broken = f"{shlex.quote(sys.executable)} -c \"raise SystemExit('no such model')\" {{port}}"
    with pytest.raises(
        ConfigError, match=r"(?s)B does not start: it ended with status 1.*no such model"
    ):
        run(
            command(tmp_path, "a", 0.0), broken, tmp_path / "ab.jsonl", repeats=1, keep_running=True
        )
    with pytest.raises(ConfigError, match="A does not start: no-such-program"):
        run("no-such-program {port}", broken, tmp_path / "ab.jsonl")
    with pytest.raises(ConfigError, match=r"has no \{port\}"):
        run("sleep 1", broken, tmp_path / "ab.jsonl")
