"""The blocks of the documents that are marked `<!-- run -->` run against the demo server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade_bench.fixtures.pdf import Sheet, pdf
from saccade_bench.fixtures.server import Server, serving
from tests.docs.pages import PAGES, ROOT, blocks
from tests.helpers.images import png

pytestmark = pytest.mark.more

MARKED = [page for page in PAGES if any(block.runs for block in blocks(page))]
ADDRESS = re.compile(r"(http://)?(127\.0\.0\.1|localhost):8000\b")
"""As the documents write it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("documented")
    with serving("demo", folder, "--files-dir", str(folder / "files")) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make demo` leaves, and files that a reader has."""
    folder = tmp_path_factory.mktemp("reader")
    drawn = folder / "out" / "demo"
    drawn.mkdir(parents=True)
    for number, color in enumerate(("white", "red", "blue"), 1):
        (drawn / f"picture-{number}.png").write_bytes(png(color, (256, 192)))
    (folder / "report.pdf").write_bytes(pdf([Sheet(("Costs of 2024: 3100",))]))
    line = (
        '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": '
        '{"model": "demo", "messages": [{"role": "user", "content": "Say a number."}]}}\n'
    )
    (folder / "requests.jsonl").write_text(line)
    return folder


@pytest.mark.parametrize("page", MARKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_marked_blocks_run(page: Path, server: Server, folder: Path) -> None:
    python, shell = "", []
    for block in blocks(page):
        if block.runs and block.language == "python":
            python += block.text
        elif block.runs:
            shell.append(block.text)
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    commands = [["bash", "-euo", "pipefail", "-c", text] for text in shell]
    commands += [[sys.executable, "-c", python]] * bool(python)
    for command in commands:
        command[-1] = ADDRESS.sub(server.url, command[-1])
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert not done.stdout.startswith('{"error"'), done.stdout
