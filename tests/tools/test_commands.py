"""The server's own commands, as a user types them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.commands import MAIN_OPTIONS
from saccade.core.answer_options import AnswerOptions
from saccade.core.attention_options import AttentionOptions
from saccade.core.errors import ConfigError, SaccadeError
from saccade.core.options import (
    EngineOptions,
    MediaOptions,
    ModelOptions,
    ParallelOptions,
    PinOptions,
    ServerOptions,
)
from saccade.tools.chat import ask_server
from saccade.tools.server import refusal
from tests.tools.server import Script, ScriptedServer


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
            AttentionOptions,
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
