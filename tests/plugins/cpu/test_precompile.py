"""Kernels that are compiled before a model asks for them: those that models do ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.plugins.cpu import precompile
from tests.helpers.processor import HAS_BACKEND

if not HAS_BACKEND:
    pytest.skip("only for x86-64, with Numba", allow_module_level=True)

MAKE = """
import sys
from saccade.plugins.cpu import precompile
from saccade.plugins.cpu.disk_cache import USED_FILES

missing = len(precompile.find_missing())
precompile.main()
print(missing, len(USED_FILES.made), len(precompile.find_missing()), "torch" in sys.modules)
"""
ASK = """
import sys
from saccade.plugins.cpu import compiled_ops, layer, paged, sample
from saccade.plugins.cpu.disk_cache import USED_FILES

sample._kernel(), layer._gate(), layer._sigmoid_gate(), layer._rope(), paged._decode_blocks()
for adds in (False, True):
    layer._add_rms_norm(adds, 16), layer._layer_norm(adds)
for name in ("mul_f32", "concat_columns", "negative", "add_bf16"):
    compiled_ops._kernel(name)
for lane in (1, 4):
    compiled_ops._kernel("gather", lane)
print(len(USED_FILES.made), len(USED_FILES.found), "numba" in sys.modules)
"""


@pytest.mark.more
def test_what_is_compiled_ahead_no_model_compiles_again(tmp_path: Path) -> None:
    def run(program: str) -> list[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-c", program]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return told.stdout.split()

    count = str(len(precompile.KERNELS))
    assert run(MAKE) == [count, count, "0", "False"]
    assert run(ASK) == ["0", count, "False"]
    assert run(MAKE) == ["0", "0", "0", "False"], "nothing is made where all is kept"
