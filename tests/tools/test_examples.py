"""The examples name their server in one way, and say in a sentence that it is not there."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.images import png

pytestmark = pytest.mark.more

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = {
    "messages.py": (),
    "responses.py": ("one.png", "What is this?"),
    "live_screen.py": (".", "What is this?"),
    "search_pages.py": (),
    "agent/screen_agent.py": (),
    "computer_use/with_openai.py": (),
    "computer_use/with_anthropic.py": (),
    "clients/try_clients.py": (),
}


@pytest.mark.parametrize("example", WORDS)
def test_a_server_that_is_not_there_is_said_in_a_sentence(example: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    (tmp_path / "one.png").write_bytes(png())
    command = [sys.executable, str(EXAMPLES / example), *WORDS[example], "--base-url", address]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if "No module named" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 1
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"nobody answers at {address}/")


def test_every_example_is_tried() -> None:
    texts = {path.relative_to(EXAMPLES).as_posix(): path for path in EXAMPLES.glob("**/*.py")}
    found = {name for name, path in texts.items() if "__main__" in path.read_text()}
    assert found == WORDS.keys()
