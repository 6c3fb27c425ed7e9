"""The command lines, as a user types them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from saccade.commands import MAIN_OPTIONS
from saccade.core.answer_options import AnswerOptions
from saccade.core.errors import ConfigError, SaccadeError
from saccade.core.options import (
    EngineOptions,
    MediaOptions,
    ModelOptions,
    ParallelOptions,
    PinOptions,
    ServerOptions,
)
from saccade.tools import cli
from saccade.tools.chat import ask_server
from saccade.tools.options import (
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
from saccade.tools.server import refusal
from tests.tools.server import Script, ScriptedServer


def parsed(app: App, line: str) -> dict[str, Any]:
    """What a command line would call its command with."""
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
    assert found["text"] == TextOptions(100, 1, 1.0)
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


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_a_server_is_chatted_with_by_any_form_of_its_address(
    server: ScriptedServer, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(answer=lambda body: ["so ", "it ", "is"])
    ask_server(form.format(server.url), None, None, "is it?", (), 4)
    assert capsys.readouterr().out == "so it is\n"
    assert server.seen.bodies[-1]["model"] == "scripted"


def test_a_chat_that_is_refused_says_the_servers_words(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.script = Script(refuse=lambda number, body: 400, key="secret")
    with pytest.raises(SaccadeError, match=r"^refused by script$"):
        ask_server(server.url, "secret", None, "x", (), 4)
    for model in (None, "named"):
        with pytest.raises(SaccadeError, match=r"no key .--api-key KEY."):
            ask_server(server.url, None, model, "x", (), 4)
        with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1 \(connection refused\)"):
            ask_server("http://127.0.0.1:1/v1", None, model, "x", (), 4)
    with pytest.raises(ConfigError, match=r"--image .*gone"):
        ask_server(server.url, None, "named", "x", (tmp_path / "gone.png",), 4)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "a"}}', "a"),
        ('{"error": "b"}', "b"),
        ('{"object": "error", "message": "c"}', "c"),
        ('{"detail": "d"}', "d"),
        ("<html>e</html>\n", "<html>e</html>"),
        ("[1]", "[1]"),
        ("", "HTTP 502 without a word"),
    ],
)
def test_the_servers_words_are_found_in_whatever_it_sends(body: str, words: str) -> None:
    assert refusal(502, body) == words


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, saccade.tools.cli; "
        "heavy = {'torch', 'transformers', 'matplotlib', 'aiohttp', 'numpy', 'PIL'} & "
        "set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def help_of(flag: str) -> str:
    program = [sys.executable, "-m", "saccade", "serve", flag]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout


def test_help_shows_what_people_set_and_help_advanced_shows_every_option() -> None:
    every = {
        f"--{field.name.replace('_', '-')}"
        for options in (
            ModelOptions,
            EngineOptions,
            PinOptions,
            ParallelOptions,
            MediaOptions,
            ServerOptions,
            AnswerOptions,
        )
        for field in dataclasses.fields(options)
    }
    brief, advanced = help_of("--help"), help_of("--help-advanced")
    assert {option for option in every if option in brief.split()} == MAIN_OPTIONS
    assert {option for option in every if option in advanced.split()} == every
    assert "--help-advanced" in brief
