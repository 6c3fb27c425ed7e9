"""What a Python process of Saccade's may import: what its starter may, whatever the folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.ipc.launch import put_first
from saccade.ipc.python import python_environment, start_python
from saccade.ipc.tied import start_tied
from tests.helpers.traps import lay_traps


def test_an_entry_of_the_path_keeps_the_folder_that_it_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty entries and relative ones name the current folder, or one in it."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "inner")])
    given = {"PYTHONPATH": ":inner:/else", "A": "b"}
    kept = f"{tmp_path}:{tmp_path / 'inner'}:/else"
    assert python_environment(given) == {"PYTHONPATH": kept, "A": "b", "PYTHONSAFEPATH": "1"}
    monkeypatch.chdir("elsewhere")
    assert python_environment(given)["PYTHONPATH"] == "/else", "not another folder of this name"
    monkeypatch.setattr(sys, "path", [])
    assert python_environment({"PYTHONPATH": ":"})["PYTHONPATH"] == "", "as if it were not set"
    assert "PYTHONPATH" not in python_environment({})


@pytest.mark.parametrize("path", ["", ":", "inner", "/nowhere:"])
def test_no_file_of_a_folder_that_the_starter_entered_later_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    marker = lay_traps(tmp_path / "downloads")
    lay_traps(tmp_path / "downloads" / "inner")
    monkeypatch.chdir(tmp_path / "downloads")
    monkeypatch.setenv("PYTHONPATH", path)
    for start in (start_python, start_tied):
        with start("json.tool", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.communicate(b"[]")[0] == b"[]\n"
    assert marker.read_text() == (marker.parent / "downloads/imported-from-inner").read_text() == ""


def test_the_folder_of_saccade_comes_no_earlier_than_needed(tmp_path: Path) -> None:
    """Python's modules and installed ones keep their place, and no other Saccade is first."""
    (tmp_path / "other" / "saccade").mkdir(parents=True)
    python, other, root = "/usr/lib/python", str(tmp_path / "other"), str(tmp_path / "root")
    (tmp_path / "root" / "saccade").mkdir(parents=True)
    for before, after in [
        ([python], [python, root]),
        ([python, other], [python, root, other]),
        ([python, root, other], [python, root, other]),
        ([root, python], [root, python]),
    ]:
        path = list(before)
        put_first(root, path)
        assert path == after


def test_an_isolated_process_starts_isolated_ones(tmp_path: Path) -> None:
    """`python -I`: the user's environment counts in none of them."""
    lay_traps(tmp_path / "traps")
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from saccade.ipc.python import start_python\n"
        "start_python('site').wait()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "traps")}
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and str(tmp_path) not in done.stdout, done.stderr
    assert "saccade" not in done.stderr
