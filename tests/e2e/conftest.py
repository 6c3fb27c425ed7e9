"""Servers that several files ask, each started once: `TOGETHER` in the repository's conftest.py
gives these files to one process. Counts are read as differences, and nobody ends what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.e2e.ways import KEY, TOWER

if TYPE_CHECKING:
    from tests.e2e.rays import RayFleet
    from tests.e2e.walks import Measured


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Path:
    """The checkpoint that a file's own servers have unless it makes another."""
    return checkpoint("qwen3_vl")


@pytest.fixture(scope="session")
def tiny(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Random weights behind a key, with every option of the tower and prompts in chunks."""
    from tests.e2e.test_serve import OPTIONS

    keys = ("--api-key", KEY, "--metrics-without-key")
    folder = tmp_path_factory.mktemp("tiny")
    with serving(checkpoint("qwen3_vl"), folder, *OPTIONS, *keys, *TOWER) as server:
        yield server


@pytest.fixture(scope="session")
def server(tiny: Server) -> Server:
    """The server that a file asks unless it starts its own."""
    return tiny


@pytest.fixture(scope="session")
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with clocks of a second; an answer whose length a bent request leaves open
    ends with the context.
    """
    folder = tmp_path_factory.mktemp("hurried")
    clocks = ("--tune", "body_timeout=1", "--tune", "header_timeout=1", "--tune", "fetch_timeout=1")
    bounds = ("--context-length", "1024", "--files-dir", str(folder / "files"))
    with serving("demo", folder, *clocks, *bounds) as server:
        yield server


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measured, Measured]:
    """What requests enter, and what processes load. The lists are of x86-64 with Numba."""
    from tests.e2e.walks import measure
    from tests.helpers.processor import HAS_BACKEND

    if not HAS_BACKEND:
        pytest.skip("another processor, or no Numba")
    return measure(tmp_path_factory.mktemp("walks"))


@pytest.fixture(scope="session")
def ray_fleet(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayFleet]:
    """Two servers, where Ray is installed."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    from tests.e2e.rays import deployed

    with deployed(checkpoint("qwen3_vl"), tmp_path_factory.mktemp("r"), 2) as fleet:
        print(f"\nready after {fleet.started:.1f} s; Ray's own processes: {fleet.bytes >> 20} MiB")
        yield fleet
