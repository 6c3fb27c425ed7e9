"""When a process compiles kernels beside the model's, and that it ends."""

from __future__ import annotations

import subprocess
from functools import partial

import psutil
import pytest
import torch

from saccade.kernels import device as placement
from saccade.kernels.x86 import ahead
from saccade.runtime import compile_ahead
from saccade.runtime.compile_ahead import begin_compiling

if not placement.has_numba():
    pytest.skip("only for x86-64, with Numba", allow_module_level=True)

CPU, HALF = torch.device("cpu"), torch.bfloat16
LONG = ["sleep", "600"]


@pytest.fixture(autouse=True)
def first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores, with a process that takes long in place of one that compiles."""
    monkeypatch.setattr(compile_ahead, "usable_cores", lambda: 2)
    start = partial(subprocess.Popen, LONG)
    monkeypatch.setattr(compile_ahead, "start_tied", lambda _, **options: start(**options))
    monkeypatch.setattr(ahead, "find_missing", lambda: [ahead.KERNELS[0]])


def running() -> int:
    return sum(child.cmdline() == LONG for child in psutil.Process().children())


def test_it_ends_when_the_model_has_its_kernels() -> None:
    end = begin_compiling(CPU, HALF, 0, 1)
    assert running() == 1
    end()
    assert running() == 0


@pytest.mark.parametrize("why", ["all is kept", "no core is left", "another rank", "float32"])
def test_nothing_is_started_where_it_has_nothing_to_do(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "all is kept":
        monkeypatch.setattr(ahead, "find_missing", list)
    ranks = 2 if why == "no core is left" else 1
    rank = 1 if why == "another rank" else 0
    end = begin_compiling(CPU, torch.float32 if why == "float32" else HALF, rank, ranks)
    assert running() == 0
    end()
