"""What docs say of families is what their folders say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from saccade.families.registry import find_family
from tests.fixtures.tiny import Tiny, tinies

ROOT = Path(__file__).parents[2]


def test_tables_of_docs_are_current() -> None:
    command = [sys.executable, "scripts/tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tiny", tinies().values(), ids=tinies())
def test_a_family_with_tiny_checkpoints_says_what_it_serves(tiny: Tiny) -> None:
    folder = find_family(tiny.architecture).spec.split(":")[0].rpartition(".")[0].replace(".", "/")
    rows = tomllib.loads((ROOT / folder / "facts.toml").read_text())["family"]
    assert all(len(row) == 4 and row["models"] for row in rows)


def test_an_architecture_has_one_name() -> None:
    names = [tiny.architecture for tiny in tinies().values()]
    assert len({*names}) == len(names)
