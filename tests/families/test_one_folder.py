"""A family is one folder: under another name, it is found with no line changed elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACT = "tests/families/test_contract.py"
pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]


def test_a_family_under_another_name_passes_the_contract(tmp_path: Path) -> None:
    skip = shutil.ignore_patterns(".*", "__pycache__", "build", "out", "results")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=skip)
    families = tmp_path / "tree" / "saccade" / "families"
    new = (families / "smolvlm").rename(families / "newcomer")
    for file in new.glob("*.py"):
        moved = file.read_text().replace("saccade.families.smolvlm", "saccade.families.newcomer")
        file.write_text(moved)
    path = os.pathsep.join((str(tmp_path / "tree"), str(tmp_path / "tree" / "bench")))
    programs = (
        ("scripts/tables.py", "--check"),
        ("-m", "pytest", CONTRACT, "-k", "smolvlm", "-m", "not slow and not more"),
    )
    for program in programs:
        command = [sys.executable, *program]
        environment = os.environ | {"PYTHONPATH": path}
        environment.pop("PYTEST_XDIST_WORKER", None)
        done = subprocess.run(
            command, cwd=tmp_path / "tree", env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
