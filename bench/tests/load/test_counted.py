"""The progress of a long command when its output is not a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from saccade.core.errors import ConfigError
from saccade_bench import counted as module
from saccade_bench.counted import counted
from saccade_bench.eval.ocrbench import items
from tests.terminal import Terminal


def test_lines_tell_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    with counted("counting", 3) as tell:
        tell(1)
        tell(2, "one of them odd")
    assert capsys.readouterr().err.splitlines() == [
        "counting: 3 to do",
        "counting: 1 of 3 done",
        "counting: 2 of 3 done, one of them odd",
    ]
    with counted("counting", 3, quiet=True) as tell:
        tell(1)
    assert capsys.readouterr() == ("", "")


def test_a_simulation_says_how_far_it_is_when_it_is_piped_and_in_a_terminal() -> None:
    command = [
        sys.executable,
        "-m",
        "saccade_bench",
        "simulate",
        "--trace",
        "chat",
        "--num-prompts",
        "5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("simulating: ")
    with Terminal(command) as terminal:
        terminal.until("simulating")
        assert terminal.ended() == 0
        assert "to do" not in terminal.shown


def test_an_eval_without_the_hub_says_where_its_file_may_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Hub:
        class errors:  # noqa: N801 - as the hub's library has it
            HfHubHTTPError = OSError

        @staticmethod
        def snapshot_download(*_: object, **__: object) -> str:
            raise OSError("ConnectError")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("saccade_bench.eval.records.importlib.import_module", lambda name: Hub)
    with pytest.raises(ConfigError, match=r"ConnectError.*--dataset-path FOLDER"):
        items(None)
