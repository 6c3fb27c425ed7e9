"""Machine code accesses no byte out of bounds: its memory begins or ends at guard pages. A fault
ends a process, so each run has its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.kernels.processor import has_bf16
from saccade.plugins.cpu import cpu_info
from saccade.plugins.cpu.resize import WIDE, vector_bytes
from tests.helpers.guarded import HIDDEN, SIDE, SIDES, Side
from tests.helpers.processor import FEW_BITS, HAS_BACKEND

TESTS = Path(__file__).parents[2]
CHOSEN = (
    "plugins/cpu/test_compiled.py",
    "plugins/cpu/test_delta_rule.py",
    "plugins/cpu/test_language_attention.py",
    "plugins/cpu/test_panels.py",
    "plugins/cpu/test_capture.py",
    "kernels/test_reference_sample.py",
    "kernels/test_int8.py::test_a_product_is_the_references_to_the_bit",
    "kernels/test_int8.py::test_many_rows_have_the_bits_of_few",
    "kernels/test_linear.py::test_a_row_has_its_bits_in_any_company",
    "kernels/test_linear.py::test_rows_of_any_shape_are_multiplied",
    "kernels/test_linear.py::test_a_bias_may_lie_in_any_way",
    "families/test_moe.py::test_a_few_rows_compiled_are_the_products_one_by_one",
)
"""Tests that run every file of machine code."""
CODE = {file.stem for file in Path(cpu_info.__file__).parent.glob("*_code.py")} - {
    *("machine_code", "object_code"),  # these hold no instructions
    "resize_code",  # a test of its own
}
OF_BFLOAT16 = {"attention_code", "dense_code", "moe_code"}
"""For processors that multiply bfloat16."""
HASWELL = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "",
}
LESSER = [
    pytest.param({}, id="all"),
    pytest.param(
        {HIDDEN: "amx_bf16,amx_int8,amx_tile"},
        id="no AMX",
        marks=pytest.mark.skipif("amx_tile" not in cpu_info.flags(), reason="no AMX to hide"),
    ),
    pytest.param(
        HASWELL,
        id="AVX2",
        marks=pytest.mark.skipif("avx512f" not in cpu_info.flags(), reason="no AVX-512 to hide"),
    ),
]
"""Environments in which kernels use all instructions of this processor, or fewer."""
BEYOND = """
import sys
from tests.helpers.guarded import guarded_bytes, GuardedTensors
import torch
from saccade.plugins.cpu.layer import _sigmoid_gate, compiled_sigmoid_gate, bits
with GuardedTensors("end"):
    x = torch.ones(3, 40, dtype=torch.bfloat16)
    compiled_sigmoid_gate(x, 1.0, 0.0)
    out = torch.empty_like(x)
print("inside", flush=True)
_sigmoid_gate()(1, 121, x.data_ptr(), out.data_ptr(), 121, bits(1.0), bits(0.0))
print("beyond", flush=True)
"""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **environment},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not HAS_BACKEND, reason="only for x86-64 with Numba")
def test_one_value_too_many_is_a_fault() -> None:
    done = run("-c", BEYOND)
    assert (done.stdout.split(), done.returncode) == (["inside"], -signal.SIGSEGV), done.stderr


@pytest.mark.skipif(not vector_bytes(), reason="resizing is compiled for x86-64 with AVX2")
@pytest.mark.parametrize("wide", [wide for wide, name in WIDE if name in cpu_info.flags()])
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_resizing_touches_nothing_else(wide: int, count: int) -> None:
    """By each kind of vectors that the processor has, not by the best one alone."""
    done = run("-m", "tests.plugins.cpu.guarded_resize", f"{wide}", f"{count}")
    sizes = done.stdout.splitlines()
    assert done.returncode == 0, f"{sizes[-1:]} ended with {done.returncode}: {done.stderr}"
    assert len(sizes) == count


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BACKEND, reason="only for x86-64 with Numba")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lesser", LESSER)
@pytest.mark.parametrize("side", SIDES)
def test_kernels_touch_nothing_else(side: Side, lesser: dict[str, str]) -> None:
    """Their own tests, those that this processor runs, by the instructions that it is left."""
    # The run's own time limit counts: guards slow tests of many small tensors down.
    chosen = ["-p", "tests.helpers.guarded", "-m", "not slow", "--timeout", "0"]
    chosen += ["-k", "not process and not import and not host"]
    files = [f"tests/{each}" for each in CHOSEN]
    done = run("-m", "pytest", "-q", "-p", "no:xdist", *chosen, *files, **{SIDE: side}, **lesser)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout} {done.stderr}"
    assert int(done.stdout.rpartition("guarded tensors: ")[2].split()[0]) > 1000
    missing = CODE - {*re.findall(r"^machine code: (\w+)", done.stdout, re.MULTILINE)}
    if not has_bf16() or lesser is HASWELL:
        missing -= OF_BFLOAT16
    if not FEW_BITS.takes_int4 or lesser is HASWELL:
        missing -= {"vnni_code"}
    assert not missing
