"""What a package index gets: metadata, links that work there, and bounds of what is required."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from email import message_from_string
from email.message import Message
from importlib.metadata import version
from pathlib import Path

import pytest

from saccade.core.extras import describe_too_new
from saccade.ipc.python import python_command

pytestmark = pytest.mark.more

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
