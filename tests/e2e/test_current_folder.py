"""Commands in a folder with hostile files: none of them is imported by any process, and a server's
parts work elsewhere."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from saccade.ipc.python import python_command
from saccade_bench.fixtures.pdf import Sheet, pdf
from saccade_bench.fixtures.server import running
from tests.fixtures.tiny import picture
from tests.helpers.images import png
from tests.helpers.traps import lay_traps

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of traps. None of them may have been imported at the end."""
    folder = tmp_path / "downloads"
    marker = lay_traps(folder)
    yield folder
    assert marker.read_text() == ""


def run(folder: Path, *words: str) -> str:
    command = python_command("saccade", *words)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_server_and_its_clients_import_nothing_from_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With kernels to compile: Numba looks for settings in the current folder, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "scan.png").write_bytes(png("blue"))
    serve = ("serve", "demo", "--threads", "1", "--media-workers", "1")
    with running(tmp_path, *serve, cwd=folder) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 4
        assert {each.cwd() for each in children if each.status() != psutil.STATUS_ZOMBIE} == {"/"}
        base = ("--base-url", f"{server.url}/v1")
        run(folder, "chat", *base, "--image", "scan.png", "What is it?")
        with running(tmp_path, "route", "--workers", server.url, cwd=folder) as router:
            assert httpx.get(f"{router.url}/v1/models").is_success
        with running(tmp_path, "proxy", "--upstream", server.url, cwd=folder) as proxy:
            assert httpx.get(f"{proxy.url}/v1/models").is_success


def test_documents_are_read_among_hostile_files(folder: Path) -> None:
    (folder / "scan.pdf").write_bytes(
        pdf([Sheet(["text"], picture(40, 60, 500), (160.0, 128.0), 12)])
    )
    run(folder, "ocr", "scan.pdf", "--model", "demo", "--output", "out.md")


def test_the_demo_runs_among_hostile_files(folder: Path) -> None:
    run(folder, "demo", "--exit")


@contextmanager
def serving_in(folder: Path) -> Iterator[psutil.Process]:
    """`python -m saccade serve demo`, which searches the current folder first, once it serves."""
    log = folder.parent / "log"
    command = [sys.executable, "-m", "saccade", "serve", "demo", "--threads", "1", "--port", "0"]
    with log.open("wb") as out:
        server = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 100
        while "serving at" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def test_parts_of_a_clone_are_its_own_and_search_it_for_nothing_else(tmp_path: Path) -> None:
    """Processes of `python -m saccade` in a clone that is not installed are that clone's, whatever
    is installed. Python itself lets the first one alone import what else is there.
    """
    clone = tmp_path / "clone"
    marker = lay_traps(clone, only={"torch", "numba", "safetensors"})
    shutil.copytree(Path(__file__).parents[2] / "saccade", clone / "saccade")
    with serving_in(clone) as server:
        children = server.children(recursive=True)
        launched = {each.cmdline()[2] for each in children}
        assert launched == {str(clone / "saccade" / "ipc" / "launch.py")}
        assert marker.read_text() == ""
