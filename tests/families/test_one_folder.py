"""A family is one folder: under another name, or in another distribution, it is found with no line
changed elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.distribution import install_plugin

ROOT = Path(__file__).parents[2]
CONTRACT = (
    *("-m", "pytest", "tests/families/test_contract.py", "-k", "smolvlm"),
    *("-m", "not slow and not more", "-n0"),
)
pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]


SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "build", "out", "results")


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=SKIPPED))


def rename(source: Path, target: Path, package: str) -> None:
    """Move SmolVLM's folder, whose modules are named below another package from then on."""
    source.rename(target)
    for file in target.glob("*.py"):
        file.write_text(file.read_text().replace("saccade.plugins.models.smolvlm", package))


def run(tree: Path, *programs: Sequence[str]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "bench")))}
    environment.pop("PYTEST_XDIST_WORKER", None)
    for program in programs:
        command = [sys.executable, *program]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_family_under_another_name_passes_the_contract(tmp_path: Path) -> None:
    tree = copied(tmp_path)
    models = tree / "saccade" / "plugins" / "models"
    rename(models / "smolvlm", models / "newcomer", "saccade.plugins.models.newcomer")
    run(tree, ("scripts/tables.py", "--check"), CONTRACT)


def test_a_family_of_another_distribution_passes_the_contract(tmp_path: Path) -> None:
    tree = copied(tmp_path)
    (tree / "newcomers").mkdir()
    record = (
        "from saccade.plugin import Checkpoints, Plugin\n"
        'PLUGIN = Plugin("newcomers", checkpoints=Checkpoints(families="newcomers"))\n'
    )
    (tree / "newcomers" / "__init__.py").write_text(record)
    install_plugin(tree, "newcomers")
    smolvlm = tree / "saccade" / "plugins" / "models" / "smolvlm"
    rename(smolvlm, tree / "newcomers" / "newcomer", "newcomers.newcomer")
    run(tree, CONTRACT)
