"""`saccade demo`, as a newcomer runs it: the real server, the trained model, and only what is new
is encoded.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade.demo import run as demo
from saccade.demo.run import QUESTIONS, ask, program, user_message
from saccade_bench.fixtures.server import serving

pytestmark = pytest.mark.more


def test_the_demo_answers_every_question_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "saccade", "demo", "--exit"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    questions = len(QUESTIONS)
    assert done.stdout.count("  right\n") == questions and "wrong" not in done.stdout
    assert sorted(path.name for path in (tmp_path / "out" / "demo").iterdir()) == [
        "picture-1.png",
        "picture-2.png",
        "picture-3.png",
    ]


def test_an_answer_is_waited_for_as_long_as_the_server_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timeouts: list[httpx.Timeout] = []

    def converse(client: httpx.Client, *_: object) -> bool:
        timeouts.append(client.timeout)
        return True

    monkeypatch.setattr(demo, "own_server", lambda *_, **__: nullcontext())
    monkeypatch.setattr(demo, "wait_until_ready", lambda *_: None)
    monkeypatch.setattr(demo, "converse", converse)
    assert demo.run(exit_after=True, out=tmp_path) == 0
    assert timeouts == [httpx.Timeout(None)]


def test_the_command_to_type_works_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` puts nothing on the path."""
    script = tmp_path / "my clone" / ".venv" / "bin" / "saccade"
    monkeypatch.setenv("PATH", str(script.parent))
    assert program(script) == (sys.executable, "-m", "saccade")
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert program(script) == ("saccade",)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program(script) == (str(script),)
    monkeypatch.chdir(script.parents[2])
    assert program(script) == (".venv/bin/saccade",)


@pytest.mark.slow
def test_a_turn_of_the_demo_encodes_its_new_picture_only(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = []
    pictures = 0
    with (
        serving("demo", tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        for turn in QUESTIONS:
            messages.append(user_message(turn))
            answer = ask(client, "demo", messages)
            assert answer.text == turn.answer
            assert (answer.encoded, answer.reused) == (len(turn.images), pictures)
            assert bool(answer.cached_tokens) == bool(pictures)
            pictures += len(turn.images)
            messages.append({"role": "assistant", "content": answer.text})
