"""The server's own commands, as a user types them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from difflib import get_close_matches
from pathlib import Path

import pytest

from saccade.commands import BASIC, EXAMPLES, HELP, OTHER_COMMANDS, SERVE_OPTIONS, app, run
from saccade.core.errors import ConfigError, SaccadeError
from saccade.core.tuning import option, tuning_values
from saccade.tools.chat import ask_server
from saccade.tools.server import refusal
from tests.helpers.images import png
from tests.tools.server import Script, ScriptedServer

ROOT = Path(__file__).parents[2]


@pytest.mark.first
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
    picture = tmp_path / "a.png"
    picture.write_bytes(png())
    with pytest.raises(SaccadeError, match=r"^refused by script$"):  # no session: no next question
        ask_server(server.url, "secret", None, "x", (picture,), 4)
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
        ("", "HTTP 502 without a body"),
    ],
)
def test_the_servers_words_are_found_in_whatever_it_sends(body: str, words: str) -> None:
    assert refusal(502, body) == words


WIDE = os.environ | {"COLUMNS": "200"}
"""No option is cut where a line ends."""


def help_of(flag: str) -> str:
    program = [sys.executable, "-m", "saccade", "serve", flag]
    return subprocess.run(program, capture_output=True, text=True, check=True, env=WIDE).stdout


@pytest.mark.more
def test_help_shows_what_people_set_and_help_advanced_shows_every_option() -> None:
    names = {each.name for kind in SERVE_OPTIONS for each in dataclasses.fields(kind)}
    tuning = tuning_values(SERVE_OPTIONS).keys()
    every, no_options = ({option(name) for name in each} for each in (names - tuning, tuning))
    brief, advanced = help_of("--help").split(), help_of("--help-advanced").split()
    assert every > BASIC and every.intersection(brief) == BASIC
    assert every <= {*advanced} and not no_options.intersection(advanced)
    assert tuning <= {word.rstrip(":") for word in advanced} and not tuning & {*brief}
    assert "--help-advanced" in brief


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["serve", "--hlep"], "--help"),
        (["--hlep"], "--help"),
        (["demo", "-help"], "--help"),
        (["route", "--halp"], "--help"),
        (["serve", "--help-advance"], "--help-advanced"),
        (["serve", "--prot", "3"], "--port"),
    ],
)
def test_a_misspelt_help_is_understood(
    words: list[str],
    meant: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["saccade", *words])
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"Did you mean {meant}?" in told


def test_no_option_is_taken_for_a_misspelt_help() -> None:
    every = [option(each.name) for kind in SERVE_OPTIONS for each in dataclasses.fields(kind)]
    assert [each for each in every if get_close_matches(each, HELP, n=1, cutoff=0.75)] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["batch", "requests.jsonl"], "no command batch. Upload the file to /v1/files"),
        (["pull", "Qwen/Qwen3-VL-2B-Instruct"], "no command pull. `saccade serve MODEL` downloads"),
        (["download"], "no command download. `saccade serve MODEL` downloads"),
        (["run", "demo"], "no command run. `saccade serve MODEL` serves a model"),
        (["list"], "no command list. `GET /v1/models` lists"),
        (["ls"], "no command ls. `GET /v1/models` lists"),
        (["ps"], "no command ps. One server serves one model."),
        (["rm", "demo"], "no command rm. A model is a directory or a file"),
        (["stop"], "no command stop. Ctrl-C or SIGTERM"),
        (["help"], "no command help. `saccade --help` lists the commands."),
        (["serv", "demo"], "no command serv. Did you mean `saccade serve`?"),
        (["SERVE"], "no command SERVE. Did you mean `saccade serve`?"),
        (["simulat"], "no command simulat. Did you mean `saccade simulate`?"),
        (["xyz"], "no command xyz. `saccade --help` lists the commands."),
        (["Qwen/Qwen3-VL-2B-Instruct"], "type `saccade serve Qwen/Qwen3-VL-2B-Instruct`."),
        (["some.gguf"], "type `saccade serve some.gguf`."),
        (["tests"], "type `saccade serve tests`."),
        (["\udcff"], "no command \\udcff. `saccade --help`"),
    ],
)
def test_an_unknown_command_says_what_to_type(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["saccade", *words])
    monkeypatch.chdir(ROOT)
    assert run() == 1
    assert told in capsys.readouterr().err


def test_no_command_that_exists_is_among_those_of_other_servers() -> None:
    assert OTHER_COMMANDS.keys().isdisjoint(app)


def test_the_help_of_serve_has_commands_that_parse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        app(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    examples = re.findall(r"saccade (serve [^-`][^`]+)`", EXAMPLES)
    assert len(examples) == 3
    for example in examples:
        assert f"saccade {example}" in told
        app.parse_args(example.split())
