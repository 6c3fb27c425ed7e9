"""`saccade chat` as a session: what it sends, what it keeps, what it says of the caches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.core.errors import ConfigError
from saccade.tools.chat import converse
from tests.tools.server import Script, ScriptedServer, pictures, texts

TRACE = {
    "images": [
        {
            "found": "embedding",
            "tier": "device",
            "digest": "ab" * 32,
            "missed": {"kv": "other prompt"},
            "ms": {"fetch": 1.0, "digest": 0.5, "decode": 0.0, "wait": 0.0, "encode": 0.0},
        }
    ]
}


def said(server: ScriptedServer, capsys: pytest.CaptureFixture[str], *lines: str) -> str:
    converse(server.url, None, None, (), 4, lines)
    return capsys.readouterr().out


def test_a_session_keeps_its_history_and_says_what_was_cached(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.script = Script(answer=lambda body: ["so ", "it ", "is"], trace=TRACE, owner="saccade")
    image, saved = tmp_path / "a b.png", tmp_path / "saved.json"
    image.write_bytes(b"bytes")
    lines = [f"/image {image}", "first?", "/image http://x/y.png", "second?", f"/save {saved}"]
    command = [sys.executable, "-m", "saccade", "chat", "--base-url", server.url]
    done = subprocess.run(
        command, input="\n".join([*lines, "/clear", "third?"]), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = "so it is\n  5 of {} prompt tokens cached\n  image 1 (abababababab) embedding: device, "
    assert done.stdout.startswith(told.format(58) + "1.5 ms; not in kv: other prompt\n")
    first, second, third = server.seen.bodies[-3:]
    assert pictures(first) == ["data:image/png;base64,Ynl0ZXM="] and first["saccade"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][1]["content"] == "so it is"
    assert pictures(second)[1:] == ["http://x/y.png"] and texts(third).strip() == "third?"
    history = json.loads(saved.read_text())["messages"]
    assert history == [*second["messages"], {"role": "assistant", "content": "so it is"}]


def test_another_server_is_asked_for_nothing_it_does_not_know(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(answer=lambda body: ["yes"])
    assert said(server, capsys, "is it?").startswith("yes\n  5 of ")
    assert "saccade" not in server.seen.bodies[-1]


def test_what_goes_wrong_is_said_and_was_never_asked(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.script = Script(
        answer=lambda body: ["yes"],
        refuse=lambda number, body: 400 if "bad" in texts(body) else None,
    )
    out = said(
        server, capsys, "bad", f"/image {tmp_path / 'gone.png'}", "/what", "good", "/quit", "x"
    )
    refused, missing, commands, answer, *rest = out.splitlines()
    assert refused == "error: refused by script"
    assert missing.startswith("error: --image") and "gone.png" in missing
    assert commands.startswith("/image PATH or URL") and answer == "yes" and len(rest) == 1
    assert texts(server.seen.bodies[-1]) == "good"


def test_a_session_needs_a_server() -> None:
    with pytest.raises(ConfigError, match="is the server running"):
        converse("http://127.0.0.1:1", None, None, (), 4, ["hi"])
