"""Commands of other distributions: `saccade` has them where these are installed, and says what
brings them where they are not.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import saccade
from saccade.tools.brought import MEASURING

PROGRAM = """
import importlib.metadata, sys
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **which: (
    () if which == {{'group': 'saccade.commands'}} else found(**which)
)
sys.argv = ['saccade', *{words!r}]
from saccade.__main__ import main
main()
"""
ARGUMENTS = {
    "bench": ["ab", "--a", "x {port}", "--b", "y {port}"],
    "eval": ["shapes"],
    "simulate": ["--trace", "chat", "--profile", "h200"],
    "make-checkpoint": ["--preset", "small-qwen3-vl", "--out", "made"],
}


def installed(folder: Path) -> Path:
    """The package as a wheel brings it: without the source tree around it."""
    source = Path(saccade.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "model")
    shutil.copytree(source, folder / "saccade", ignore=ignored)
    return folder


def run(program: str, folder: Path, *more: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={"PYTHONPATH": ":".join(map(str, (folder, *more))), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


@pytest.mark.more
def test_a_command_that_is_not_installed_says_what_brings_it(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    for command in MEASURING:
        words = [command, *ARGUMENTS.get(command, [])]
        done = run(PROGRAM.format(words=words), folder)
        assert done.returncode == 1
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: saccade {command} is a command of saccade-bench. ")
        assert "python scripts/install.py ./bench" in line
    assert run(PROGRAM.format(words=["--help"]), folder).stdout.count(
        "python scripts/install.py ./bench"
    ) == len(MEASURING)


@pytest.fixture
def brings(tmp_path: Path) -> Path:
    """A distribution with two commands: one is the server's own name for measuring, one is new."""
    folder = tmp_path / "other"
    info = folder / "other-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    names = "simulate = other:simulate\ntwice = other:twice\n"
    (info / "entry_points.txt").write_text(f"[saccade.commands]\n{names}")
    (folder / "other.py").write_text(
        "import sys\nfrom cyclopts import App\n"
        "print('imported', file=sys.stderr)\n"
        "simulate = App(name='simulate')\ntwice = App(name='twice')\n"
        "@simulate.default\ndef one(number: int) -> None:\n    print('simulated', number)\n"
        "@twice.default\ndef two(number: int) -> None:\n    print(2 * number)\n"
    )
    return folder


@pytest.mark.more
def test_commands_of_an_installed_distribution_are_commands_of_saccade(
    brings: Path, tmp_path: Path
) -> None:
    folder = installed(tmp_path)

    def saccade_command(*words: str) -> subprocess.CompletedProcess[str]:
        program = f"import sys; sys.argv = ['saccade', *{words!r}]\n"
        return run(f"{program}from saccade.__main__ import main; main()", folder, brings)

    assert saccade_command("twice", "21").stdout == "42\n"
    assert saccade_command("simulate", "4").stdout == "simulated 4\n"
    shown = saccade_command("--help").stdout
    assert "Added by other." in shown and MEASURING["simulate"] in shown
    assert "imported" not in saccade_command("version").stderr, "only a command that is called is"


def test_nothing_asks_for_saccade_from_a_package_index() -> None:
    """The name is nobody's there, so it could become anybody's."""
    root = Path(saccade.__file__).parents[1]
    files = [
        root / "README.md",
        root / "bench" / "README.md",
        *root.glob("docs/**/*.md"),
        *root.glob("saccade/**/*.py"),
    ]
    assert [path for path in files if "saccade[" in path.read_text()] == []
