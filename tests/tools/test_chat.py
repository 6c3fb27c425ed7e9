"""`saccade chat` as a session: what it sends, what it keeps, what it says of the caches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.core.errors import ConfigError
from saccade.tools.chat import converse
from tests.helpers.images import data_url, png
from tests.terminal import CTRL_C, Terminal
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


PNG = png(size=(3, 2))


def said(server: ScriptedServer, capsys: pytest.CaptureFixture[str], *lines: str) -> str:
    converse(server.url, None, None, (), 4, lines)
    return capsys.readouterr().out


def test_a_session_keeps_its_history_and_says_what_was_cached(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.script = Script(answer=lambda body: ["so ", "it ", "is"], trace=TRACE, owner="saccade")
    image, saved = tmp_path / "a b.png", tmp_path / "saved.json"
    image.write_bytes(PNG)
    lines = [f"/image {image}", "first?", "/image http://x/y.png", "second?", f"/save {saved}"]
    command = [sys.executable, "-m", "saccade", "chat", "--base-url", server.url]
    done = subprocess.run(
        command, input="\n".join([*lines, "/clear", "third?"]), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = f"{image} (PNG, 3 x 2) goes with the next question\n"
    told += "so it is\n  5 of 58 prompt tokens cached\n  image 1 (abababababab) cached: embedding "
    assert done.stdout.startswith(told + "(device), 1.5 ms; not in kv: other prompt\n")
    assert "http://x/y.png goes with the next question\n" in done.stdout
    assert f"4 messages in {saved}\nforgotten: 4 messages\n" in done.stdout
    first, second, third = server.seen.bodies[-3:]
    assert pictures(first) == [data_url(PNG)] and first["saccade"]
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
    assert missing.startswith("error: /image") and "gone.png: No such file" in missing
    assert commands.startswith("/image PATH or URL") and answer == "yes" and len(rest) == 1
    assert texts(server.seen.bodies[-1]) == "good"


@pytest.mark.first
@pytest.mark.parametrize("data", [b"no image", b"", b"<svg></svg>", b"\x89PNG\r\n\x1a\nbroken"])
def test_a_file_that_is_no_image_is_refused_when_it_is_named_and_goes_with_no_question(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, data: bytes
) -> None:
    server.script = Script(answer=lambda body: ["yes"])
    bad, good = tmp_path / "a.png", tmp_path / "b.png"
    bad.write_bytes(data)
    good.write_bytes(PNG)
    refused, taken, answer, *_ = said(
        server, capsys, f"/image {bad}", f"/image {good}", "so?"
    ).splitlines()
    assert refused.startswith(f"error: /image {bad}: ") and answer == "yes"
    assert "it is empty" in refused if not data else "it is not an image" in refused
    assert taken == f"{good} (PNG, 3 x 2) goes with the next question"
    assert len(pictures(server.seen.bodies[-1])) == 1


def test_images_that_the_server_refuses_go_with_no_later_question(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(
        answer=lambda body: ["yes"],
        refuse=lambda number, body: 400 if "http://x/bad.png" in pictures(body) else None,
    )
    told = said(server, capsys, "/image http://x/bad.png", "what?", "hello").splitlines()
    assert told[1] == "error: refused by script. The image was removed: add another with /image"
    assert told[2] == "yes"
    assert [pictures(body) for body in server.seen.bodies[-2:]] == [["http://x/bad.png"], []]


def test_images_wait_for_a_server_that_is_only_busy(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(
        answer=lambda body: ["yes"], refuse=lambda number, body: 429 if number == 0 else None
    )
    told = said(server, capsys, "/image http://x/y.png", "what?", "what?").splitlines()
    assert told[1:3] == ["error: refused by script", "yes"]
    assert pictures(server.seen.bodies[-1]) == ["http://x/y.png"]


@pytest.mark.more
def test_ctrl_c_forgets_a_line_that_was_begun_and_ends_the_session_on_an_empty_one(
    server: ScriptedServer,
) -> None:
    server.script = Script(answer=lambda body: ["yes"])
    command = [sys.executable, "-m", "saccade", "chat", "--base-url", server.url]
    with Terminal(command) as terminal:
        terminal.until("\n> ")
        terminal.type("half a ques")
        terminal.until("half a ques")
        terminal.interrupt()
        terminal.until("\n> ")
        terminal.type("whole\n")
        terminal.until("yes\n")
        terminal.until("\n> ")
        assert [texts(body) for body in server.seen.bodies] == ["whole"]
        terminal.interrupt()
        assert terminal.ended() == 0
        assert "Traceback" not in terminal.shown


@pytest.mark.more
def test_ctrl_c_ends_an_answer_and_not_the_session(server: ScriptedServer) -> None:
    server.script = Script(
        answer=lambda body: ["yes "] * (1 if "short" in texts(body) else 100_000), between=0.01
    )
    command = [sys.executable, "-m", "saccade", "chat", "--base-url", server.url]
    with Terminal(command) as terminal:
        terminal.until("\n> ")
        terminal.type("long\n")
        terminal.until("yes yes yes")
        terminal.type(CTRL_C)
        terminal.until("stopped: the answer is discarded")
        terminal.until("\n> ")
        terminal.type("short\n")
        terminal.until("yes")
        terminal.until("\n> ")
        assert texts(server.seen.bodies[-1]) == "short"
        terminal.type("\x04")
        assert terminal.ended() == 0


def test_a_session_needs_a_server() -> None:
    with pytest.raises(ConfigError, match="is the server running"):
        converse("http://127.0.0.1:1", None, None, (), 4, ["hi"])
