"""Options from a file and from the environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from saccade import commands

FILE = """
model = "from/file"
port = 1
threads = 2
max-running-requests = 3
served-model-name = ["a", "b"]
metrics-without-key = true
tune = ["page_size=8"]
"""


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a command line up to the server, and return the model and its options."""
    seen: list[Any] = []
    monkeypatch.setattr("saccade.api.serve.serve", lambda *args: seen.append(args[:2]) or 0)
    monkeypatch.setattr("saccade.engine.link.begin_engine", lambda _: _NoEngine())

    def run(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["saccade", "serve", *words])
        assert commands.run() == 0
        return seen.pop()

    (tmp_path / "saccade.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return run


class _NoEngine:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


@pytest.mark.parametrize("form", [("--config", "saccade.toml"), ("--config=saccade.toml",)])
def test_a_file_has_options_and_the_model(typed: Any, form: tuple[str, ...]) -> None:
    model, options = typed(*form)
    assert model == "from/file"
    assert (options.server.port, options.engine.threads) == (1, 2)
    assert options.server.served_model_name == ("a", "b")
    assert options.server.metrics_without_key
    assert options.engine.page_size == 8


def test_the_command_line_beats_the_environment_and_the_environment_the_file(
    typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SACCADE_PORT", "10")
    monkeypatch.setenv("SACCADE_THREADS", "20")
    monkeypatch.setenv("SACCADE_MODEL", "from/environment")
    model, options = typed("from/line", "--config", "saccade.toml", "--threads", "200")
    assert model == "from/line"
    assert (options.server.port, options.engine.threads) == (10, 200)
    assert options.engine.max_running_requests == 3
    assert typed()[0] == "from/environment"


def test_without_either_the_defaults_hold(typed: Any) -> None:
    model, options = typed()
    assert model == "demo" and options.server.port == 8000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 3", "prot"),
        ('port = "x"', "unable to convert"),
        ("port = ", "Invalid"),
        ("port = -1", "--port -1"),
    ],
)
def test_a_wrong_file_is_named(
    text: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["saccade", "serve", "--config", str(file)])
    status: object = None
    try:
        status = commands.run()
    except SystemExit as ended:
        status = ended.code
    assert status not in (0, None)
    shown = " ".join(capsys.readouterr().err.split())
    assert words in shown


def test_a_file_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["saccade", "serve", "--config", "absent.toml"])
    assert commands.run() == 1
    assert "absent.toml: No such file" in capsys.readouterr().err
