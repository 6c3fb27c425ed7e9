"""Commands that lack something in an installed Saccade: each says what brings it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import saccade
from saccade.tools.brought import BROUGHT

PROGRAM = """
import importlib.util, sys
find = importlib.util.find_spec
missing = {{'aiohttp', 'matplotlib'}}
importlib.util.find_spec = lambda name, *rest: None if name in missing else find(name, *rest)
sys.path.insert(0, {folder!r})
sys.argv = ['saccade', *{words!r}]
from saccade.__main__ import main
main()
"""
ARGUMENTS = {
    "bench report": ["runs.jsonl"],
    "bench ab": ["--a", "x {port}", "--b", "y {port}"],
    "eval": ["shapes"],
    "simulate": ["--trace", "chat", "--profile", "h200"],
    "make-checkpoint": ["--preset", "small-qwen3-vl", "--out", "made"],
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a wheel brings it: without the source tree around it."""
    folder = tmp_path_factory.mktemp("installed")
    source = Path(saccade.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "model")
    shutil.copytree(source, folder / "saccade", ignore=ignored)
    return folder


@pytest.mark.parametrize("command", BROUGHT)
def test_a_command_that_lacks_something_says_what_brings_it(
    command: str, installed: Path, tmp_path: Path
) -> None:
    words = [*command.split(), *ARGUMENTS.get(command, [])]
    program = PROGRAM.format(folder=str(installed), words=words)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: saccade {command} needs more than is installed: ")
    assert "pip install" in line and "'.[" in line


def test_nothing_asks_for_saccade_from_a_package_index() -> None:
    """The name is nobody's there, so it could become anybody's."""
    root = Path(saccade.__file__).parents[1]
    files = [
        root / "README.md",
        root / "benchmarks" / "README.md",
        *root.glob("docs/*.md"),
        *root.glob("saccade/**/*.py"),
    ]
    assert [path for path in files if "saccade[" in path.read_text()] == []
