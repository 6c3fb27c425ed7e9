"""An editable installation, as `make` makes it, beside a folder that has the package's name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
BUILD = "import setuptools.build_meta as build; print(build.build_editable('.'))"
IMPORT = "import site; site.addsitedir({site!r}); from saccade import SamplingParams as it; "


def test_the_package_is_found_from_the_folder_that_holds_the_clone(tmp_path: Path) -> None:
    """The clone is named saccade, too."""
    # Its import fails in a process that has Python's own distutils.
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is too old for this project")
    clone, installed = tmp_path / "saccade", tmp_path / "installed"
    shutil.copytree(ROOT / "saccade" / "core", clone / "saccade" / "core")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "saccade/__init__.py"):
        shutil.copy(ROOT / name, clone / name)
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=clone, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with ZipFile(clone / built.stdout.split()[-1]) as wheel:
        wheel.extractall(installed)

    program = IMPORT.format(site=str(installed)) + "import saccade; print(saccade.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],  # without the installation that runs this test
        cwd=tmp_path,
        env={"PYTHONPATH": sysconfig.get_path("purelib")},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(clone / "saccade" / "__init__.py"), done.stderr
