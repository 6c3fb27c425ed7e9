"""When a process compiles kernels beside the model's, and that it ends."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial

import psutil
import pytest

from saccade.core.config import ParallelConfig
from saccade.ipc.messages import Load
from saccade.plugins.cpu import precompile
from saccade.runtime import process
from tests.helpers.processor import HAS_BACKEND

if not HAS_BACKEND:
    pytest.skip("only for x86-64, with Numba", allow_module_level=True)

ALONE = ParallelConfig(1, "weights", "shm", 60.0)
LOAD = Load("folder", "cpu", "bfloat16", "auto", 1, ALONE)
LONG = ["sleep", "600"]


@pytest.fixture(autouse=True)
def first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores, with a process that takes long in place of one that compiles."""
    monkeypatch.setattr(process, "usable_cores", lambda: 2)
    start = partial(subprocess.Popen, LONG)
    monkeypatch.setattr(precompile, "start_tied", lambda _, **options: start(**options))
    monkeypatch.setattr(precompile, "find_missing", lambda: [precompile.KERNELS[0]])


def running() -> int:
    children = psutil.Process().children()
    # Other tests of this process may have left zombies, whose command lines cannot be read.
    alive = (child for child in children if child.status() != psutil.STATUS_ZOMBIE)
    return sum(child.cmdline() == LONG for child in alive)


def test_it_ends_when_the_model_has_its_kernels() -> None:
    end = process.compile_in_background(LOAD)
    assert running() == 1 and end is not None
    end()
    assert running() == 0


@pytest.mark.parametrize("why", ["all is kept", "no core is left", "float32"])
def test_nothing_is_started_where_it_has_nothing_to_do(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "all is kept":
        monkeypatch.setattr(precompile, "find_missing", list)
    load = replace(LOAD, dtype="float32" if why == "float32" else LOAD.dtype)
    if why == "no core is left":
        load = replace(LOAD, parallel=replace(ALONE, size=2))
    end = process.compile_in_background(load)
    assert running() == 0
    if end is not None:
        end()
