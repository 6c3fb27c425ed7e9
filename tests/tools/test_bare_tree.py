"""A tree that is not installed serves, and is checked on a GPU machine: its tracked files in a
folder, found by PYTHONPATH alone, beside packages of which none is Saccade.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from saccade_bench.gpu_check.report import read_folder
from saccade_bench.gpu_check.stages import COMMANDS

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
LIMIT = "2"
"""Seconds of a stage of the dry run. Whether it ends by then or is ended depends on the machine."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that are tracked, and those that will be."""
    list_them = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(list_them, cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    folder = tmp_path_factory.mktemp("tree")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the packages that there are here, but for Saccade's distributions."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for place in map(Path, site.getsitepackages()):
        for path in place.glob("*"):
            ours = "saccade" in path.name or path.suffix == ".pth"
            if not ours and not (packages / path.name).exists():
                (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


def run(python: Path, tree: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'bench'}"}
    command = [str(python), *words]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_there_is_no_distribution_of_saccade(python: Path, tree: Path) -> None:
    """What the other tests rest on."""
    look = (
        "from importlib.metadata import distributions; import saccade; "
        "print(saccade.__path__[0], [d.name for d in distributions() if 'saccade' in d.name])"
    )
    assert run(python, tree, ["-c", look]).stdout.split() == [str(tree / "saccade"), "[]"]


def test_a_server_of_a_bare_tree_serves(python: Path, tree: Path, tmp_path: Path) -> None:
    words = ("--device", "cpu", "--quick", "--only", "serving", "--out", str(tmp_path / "out"))
    longer = ("--limit", "400", "--budget", "500")
    done = run(python, tree, ["-m", "saccade_bench.gpu_check", *words, *longer])
    assert "serving: ok" in done.stdout, done.stdout
    assert "chat at 96p, TTFT of round 2 | " in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_of_a_command_comes_to_its_end(
    python: Path, tree: Path, tmp_path: Path, name: str
) -> None:
    """Each stage ends or is ended, none is skipped, and the archive has the log of each."""
    words = ("--command", name, "--device", "cpu", "--quick", "--limit", LIMIT)
    check = ["-m", "saccade_bench.gpu_check", *words, "--wheels", ".whl", "--out", str(tmp_path)]
    done = run(python, tree, check)
    stages = [stage.name for stage in COMMANDS[name].stages]
    assert done.returncode in (0, 1), done.stdout + done.stderr
    with tarfile.open(tmp_path / "results.tar.gz") as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    facts, outcomes = read_folder(tmp_path / "unpacked")
    assert [each.name for each in outcomes] == stages
    assert {each.status for each in outcomes} <= {"ok", "failed", "timed out"}, outcomes
    assert all((tmp_path / "unpacked" / f"{stage}.log").is_file() for stage in stages)
    assert facts["versions"]["torch"] and facts["quick"]
    assert (tmp_path / "report.md").is_file() and (tmp_path / "summary.json").is_file()
