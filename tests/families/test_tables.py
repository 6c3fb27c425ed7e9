"""What docs say of families is what their folders say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from saccade import families
from saccade_bench.fixtures.tiny import tinies

ROOT = Path(__file__).parents[2]
HOME = Path(families.__path__[0])


def test_tables_of_docs_are_current() -> None:
    command = [sys.executable, "scripts/tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(HOME.rglob("tiny.py")), ids=lambda path: path.parent.name)
def test_a_family_with_tiny_checkpoints_says_what_it_serves(path: Path) -> None:
    rows = tomllib.loads((path.parent / "facts.toml").read_text())["family"]
    assert all(len(row) == 4 and row["models"] for row in rows)


def test_an_architecture_has_one_name() -> None:
    names = [tiny.architecture for tiny in tinies().values()]
    assert len({*names}) == len(names)
