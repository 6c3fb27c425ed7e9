"""With every package as new as its bounds allow, pre-releases among them, a server starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from saccade_bench.fixtures.server import serving

pytestmark = [pytest.mark.more, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
LARGE = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""Gigabytes, and tied to each other: pre-releases of these are tried with GPUs."""


def uv(*words: str) -> str:
    command = [sys.executable, "-m", "uv", "pip", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode and re.search("error sending request|Failed to fetch|dns", done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return done.stdout


def differs(name: str, wanted: str) -> bool:
    try:
        return version(name) != wanted
    except PackageNotFoundError:
        return True


@pytest.mark.skipif(find_spec("uv") is None, reason="needs uv")
def test_a_server_starts_with_the_newest_packages_that_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = uv("compile", "--prerelease", "allow", str(ROOT / "pyproject.toml"))
    packages = [
        f"{name}=={wanted}"
        for name, wanted in PINNED.findall(newest)
        if not LARGE.fullmatch(name) and differs(name, wanted)
    ]
    if packages:
        uv("install", "--no-deps", "--prerelease", "allow", "--target", str(tmp_path), *packages)
    searched = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, searched)))
    with serving("demo", tmp_path) as server:
        body = {"model": "demo", "prompt": "how many", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
