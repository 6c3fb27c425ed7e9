"""The command lines, as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from saccade.core.errors import ConfigError
from saccade.tools.brought import MEASURING
from saccade_bench import __main__ as program
from saccade_bench import cli
from saccade_bench.options import (
    AbOptions,
    EvalOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    ProbeOptions,
    ReportOptions,
    TargetOptions,
    TextOptions,
)
from tests.tools.server import Script, ScriptedServer

ROOT = Path(__file__).parents[3]


def test_every_measuring_command_is_there_where_nothing_is_installed() -> None:
    """`python -m saccade_bench` has no entry points to find commands by."""
    assert {command.name[0] for command in program.COMMANDS} == {*MEASURING}


def parsed(app: App, line: str) -> dict[str, Any]:
    """Return the arguments that a command line would pass to its command."""
    _, bound, _ = app.parse_args(line.split(), exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def test_the_published_options_are_understood_as_published() -> None:
    line = (
        "serve --base-url http://h:1 --dataset-name image --num-prompts 500 "
        "--random-output-len 1 --random-input-len 100 "
        "--random-range-ratio 1 --image-resolution 1120x700 --image-format jpeg --image-count "
        "1 --image-content random "
        "--max-concurrency 20 --request-rate inf --burstiness 0.5 --warmup-requests 3 --seed 7 "
        "--header A=b --header C=d "
        "--goodput ttft:500 tpot:50 --output-file x.jsonl"
    )
    found = parsed(cli.bench, line)
    assert found["target"] == TargetOptions(base_url="http://h:1", header=("A=b", "C=d"))
    assert found["load"] == LoadOptions(500, 20, float("inf"), 0.5, 3, 7)
    assert found["images"] == ImageOptions(1, "1120x700", "jpeg", "random")
    assert found["text"] == TextOptions(100, random_output_len=1, random_range_ratio=1.0)
    assert found["output"] == OutputOptions(
        output_file=Path("x.jsonl"), goodput=("ttft:500", "tpot:50")
    )


def test_the_other_commands_are_understood() -> None:
    assert parsed(cli.probe, "--max-images 64 --timeout 120 --resolutions 720p 1440p") == {
        "target": TargetOptions(timeout=120.0),
        "options": ProbeOptions(resolutions=("720p", "1440p")),
    }
    assert parsed(cli.evaluation, "ocr --num-prompts 5 --concurrency 2") == {
        "name": "ocr",
        "options": EvalOptions(num_prompts=5, concurrency=2),
    }
    assert parsed(cli.bench, "report a.jsonl b.jsonl --output out")["results"] == (
        Path("a.jsonl"),
        Path("b.jsonl"),
    )
    assert parsed(cli.bench, "report a.jsonl --output out")["options"] == ReportOptions(
        output=Path("out")
    )
    assert parsed(cli.bench, "ab --a x{port} --b y{port} --repeats 2")["servers"] == AbOptions(
        "x{port}", "y{port}", repeats=2
    )


@pytest.mark.parametrize(
    "line",
    [
        "serve --num-prompts 0",
        "serve --request-rate 0",
        "serve --random-range-ratio 2",
        "serve --no-such-option 1",
    ],
)
def test_a_value_that_cannot_work_is_refused_before_anything_is_sent(line: str) -> None:
    with pytest.raises(Exception, match=line.split()[1]):
        parsed(cli.bench, line)


def test_a_whole_run_from_the_command_line_to_the_report(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(between=0.001)
    path = tmp_path / "runs.jsonl"
    line = (
        f"serve --base-url {server.url} --num-prompts 3 --image-resolution 32x32 "
        f"--random-output-len 4 --output-file {path}"
    )
    assert cli.bench(line.split(), result_action="return_value") == 0
    assert "Output throughput" in capsys.readouterr().out
    cli.bench(
        ["report", str(path), "--output", str(tmp_path / "report")], result_action="return_value"
    )
    assert capsys.readouterr().out.strip() == str(tmp_path / "report" / "report.html")
    assert (tmp_path / "report" / "report.html").stat().st_size > 20_000


def test_a_run_without_any_answer_ends_with_status_1(server: ScriptedServer) -> None:
    server.script = Script(refuse=lambda number, body: 400)
    line = f"serve --base-url {server.url} --num-prompts 2 --image-resolution 32x32 --quiet"
    assert cli.bench(line.split(), result_action="return_value") == 1


@pytest.mark.parametrize(
    "line",
    [
        "shapes --num-prompts 0",
        "ocr --concurrency 0",
        "ocr --max-tokens 0",
        "ocr --timeout 0",
        "ocr --base-url 127.0.0.1:1",
    ],
)
def test_an_eval_that_cannot_work_is_refused(line: str) -> None:
    name, option, _ = line.split()
    with pytest.raises(ConfigError, match=option):
        cli.evaluation([name, *line.split()[1:]], result_action="return_value")


@pytest.mark.slow
def test_benchmarks_are_started_as_their_readme_says() -> None:
    """They are started from the root of the repository, without PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "saccade_bench.generate", "--help"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, saccade_bench.cli; "
        "heavy = {'torch', 'transformers', 'matplotlib', 'aiohttp', 'numpy', 'PIL'} & "
        "set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
