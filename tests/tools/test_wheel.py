"""What a package index gets: metadata, links that work there, and bounds of what is required."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from importlib.metadata import version
from pathlib import Path

import pytest

from saccade.core.extras import describe_too_new
from saccade.ipc.python import python_command

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
BUILD = "import setuptools.build_meta as build; print(build.prepare_metadata_for_build_wheel('.'))"
LINK = re.compile(r"\]\(([^)\s]+)|(?:src|href)=\"([^\"]+)")


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is too old for this project")
    folder = tmp_path_factory.mktemp("source")
    (folder / "saccade").mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "saccade/__init__.py"):
        shutil.copy(ROOT / name, folder / name)
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return message_from_string((folder / built.stdout.split()[-1] / "METADATA").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a wheel that was built from the sdist, as a package index would install them."""
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is too old for this project")
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    shutil.copytree(
        ROOT / "saccade", source / "saccade", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build(source, f"build_sdist({str(folder)!r})")
    (sdist,) = folder.glob("saccade-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    build(unpacked, f"build_wheel({str(folder)!r})")
    (built,) = folder.glob("saccade-*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def build(source: Path, call: str) -> None:
    command = [sys.executable, "-c", f"import setuptools.build_meta as build; build.{call}"]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def run_installed(wheel: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the wheel's `saccade`, far from this tree."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "saccade", *words],
        env={**os.environ, "PYTHONPATH": str(wheel)},
        cwd=wheel.parent,
        capture_output=True,
        text=True,
    )


def test_a_wheel_from_the_sdist_has_every_file_of_the_package(wheel: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (path for path in (root / "saccade").rglob("*") if path.is_file())
        return {str(path.relative_to(root)) for path in found if "__pycache__" not in path.parts}

    left_out = files(ROOT) - files(wheel)
    assert {Path(name).name for name in left_out} == {"facts.toml"}  # rows of docs/models.md
    assert files(wheel) < files(ROOT)
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} == {"saccade"}


def test_a_wheel_runs_its_commands(wheel: Path) -> None:
    program = "import saccade; print(saccade.__file__)"
    where = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(wheel)
    shown = run_installed(wheel, "serve", "--help")
    assert shown.returncode == 0 and "--config saccade.toml" in shown.stdout, shown.stderr
    for name in ("demo", "route", "chat"):
        assert name in run_installed(wheel, "--help").stdout


def test_a_wheel_serves_the_demo_model(wheel: Path) -> None:
    """From start to exit: every answer about the pictures is right."""
    done = run_installed(wheel, "demo", "--exit", "--port", "0")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_link_and_image_of_the_description_is_absolute(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    links = [first or second for first, second in LINK.findall(text)]
    assert len(links) > 30 and any("docs/page.png" in link for link in links)
    assert [link for link in links if not link.startswith(("https://", "http://", "#"))] == []


def test_an_index_can_show_what_it_is(metadata: Message) -> None:
    names = ("Author", "Keywords", "Home-page", "License-Expression", "Summary")
    assert all(metadata[name] for name in names)
    assert "picture" not in metadata["Summary"]
    assert {*metadata.get_all("Classifier", [])} >= {
        f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)
    }
    assert len(metadata.get_all("Project-URL", [])) >= 3


def test_everything_that_is_always_required_has_an_upper_bound(metadata: Message) -> None:
    required = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert len(required) > 20
    assert [each for each in required if "<" not in each] == []


def test_what_is_too_new_is_named_with_the_line_to_type() -> None:
    has = version("httpx")
    assert describe_too_new(["httpx<9999", "absent-package<1", "msgspec"]) == ""
    said = describe_too_new(["httpx>=0.1,<0.2", f"rich<{version('rich')}"])
    assert f"httpx {has}, rich {version('rich')}." in said
    assert said.endswith(f"Install older ones: 'httpx<0.2' 'rich<{version('rich')}'")


@pytest.mark.parametrize("has", ["1.0.dev3", "1.0.0rc3", "1.0", "1"])
def test_a_package_that_is_too_new_ends_a_command_in_a_sentence(tmp_path: Path, has: str) -> None:
    """An httpx in which what Saccade calls is gone."""
    (tmp_path / "httpx").mkdir()
    (tmp_path / "httpx" / "__init__.py").write_text("")
    for name, text in {
        "httpx": f"Metadata-Version: 2.1\nName: httpx\nVersion: {has}\n",
        "saccade": "Metadata-Version: 2.1\nName: saccade\nVersion: 0\nRequires-Dist: httpx<1\n",
    }.items():
        (tmp_path / f"{name}-0.dist-info").mkdir()
        (tmp_path / f"{name}-0.dist-info" / "METADATA").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        python_command("saccade", "chat", "What?", "--base-url", "http://127.0.0.1:9/v1"),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"error: too new for this version of Saccade: httpx {has}. Install older ones: 'httpx<1'\n"
    )
