"""Kernels that are compiled before a model asks for them: those that models do ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.kernels import device as placement
from saccade.kernels.x86 import ahead

if not placement.has_numba():
    pytest.skip("only for x86-64, with Numba", allow_module_level=True)

MAKE = """
import sys
from saccade.kernels.x86 import ahead
from saccade.kernels.x86.kept_files import TALLY

missing = len(ahead.find_missing())
ahead.main()
print(missing, len(TALLY.made), len(ahead.find_missing()), "torch" in sys.modules)
"""
ASK = """
import sys
from saccade.kernels.x86 import draw, layer, paged, twins
from saccade.kernels.x86.kept_files import TALLY

draw._draw(), layer._gate(), layer._sigmoid_gate(), layer._turn(), paged._lay_out_singles()
for adds in (False, True):
    layer._add_rms_norm(adds, 16), layer._layer_norm(adds)
for name in ("times_reals", "place_beside", "negative", "add_halves"):
    twins._kernel(name)
for lane in (1, 4):
    twins._kernel("gather", lane)
print(len(TALLY.made), len(TALLY.found), "numba" in sys.modules)
"""


@pytest.mark.more
def test_what_is_compiled_ahead_no_model_compiles_again(tmp_path: Path) -> None:
    def run(program: str) -> list[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-c", program]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return told.stdout.split()

    count = str(len(ahead.KERNELS))
    assert run(MAKE) == [count, count, "0", "False"]
    assert run(ASK) == ["0", count, "False"]
    assert run(MAKE) == ["0", "0", "0", "False"], "nothing is made where all is kept"
