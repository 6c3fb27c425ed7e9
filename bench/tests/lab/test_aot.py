"""Kernels compile ahead of time and without a GPU to the recorded machine code, also for
architectures that `make check` leaves out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
import triton

from saccade_bench.lab.aot import (
    PROMISED,
    RECORD,
    MachineCode,
    compare,
    complaints,
    launched_kernels,
    recorded_code,
)
from saccade_bench.lab.aot_case import Promise
from saccade_bench.lab.aot_cases import cases

ROOT = Path(__file__).parents[3]
CODE = MachineCode(100, 0, 0, 4096, 4, 16, 16, ("HGMMA",))


def test_promises_are_for_one_architecture_and_records_for_all() -> None:
    spilling = replace(CODE, spills=30, stack=80, products=("HMMA",))
    assert len(complaints(Promise(hgmma=True), spilling, PROMISED)) == 2
    assert complaints(Promise(hgmma=True), spilling, 80) == []
    assert compare(spilling, asdict(spilling)) == []
    assert compare(spilling, asdict(CODE)) == ["spills 0 -> 30"]
    assert compare(replace(CODE, registers=120), asdict(CODE)) == ["registers 100 -> 120"]


PLANTED = """
import torch, triton, triton.language as tl
from saccade_bench.lab.aot import PROMISED, KernelLaunch, compile_launch, complaints
from saccade_bench.lab.aot_case import Promise

@triton.jit
def multiply(x, weight, out, inputs, wide: tl.constexpr):
    n, k = tl.arange(0, 64), tl.arange(0, 64)
    acc = tl.zeros([64, 64], tl.float32)
    for at in range(0, inputs, 64):
        row = tl.load(x + n[None, :] * inputs + at + k[:, None])
        values = tl.load(weight + n[:, None] * inputs + at + k[None, :])
        values = values.to(tl.float32) if wide else values
        acc = tl.dot(values.to(row.dtype), row, acc)
    tl.store(out + n[:, None] * 64 + n[None, :], acc)

for wide in (False, True):
    types = {"x": "*bf16", "weight": "*fp8e4nv", "out": "*fp32", "inputs": "i32"}
    types["wide"] = "constexpr"
    code = compile_launch(KernelLaunch(multiply, types, {"wide": wide}, {}, {}), PROMISED)
    print(wide, *complaints(Promise(access=0), code, PROMISED))
"""


def test_slow_conversions_in_a_loop_of_products_are_refused(tmp_path: Path) -> None:
    """Such conversions are from 8 bits to bfloat16, which GPUs do one value at a time."""
    (tmp_path / "planted.py").write_text(PLANTED)
    environment = {key: each for key, each in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    command = [sys.executable, str(tmp_path / "planted.py")]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    slow, quick = ended.stdout.splitlines()
    assert "F2F.BF16" in slow and quick == "True", ended.stderr


def test_a_record_stands_for_what_it_was_compiled_from_alone() -> None:
    before = json.loads(json.dumps(asdict(CODE) | {"digest": "one"}))
    assert recorded_code(before, "one") == CODE
    assert recorded_code(before, "another") is None
    assert recorded_code({}, "one") is None


def test_no_record_has_attention_products_or_draws_that_spill() -> None:
    """This holds for any architecture and any Triton version, except where a launch limits its
    registers.
    """
    records = sorted((ROOT / RECORD).glob("sm_*.json"))
    assert {"sm_80", "sm_89", "sm_90", "sm_100"} <= {each.name.split("-")[0] for each in records}
    spilling = [
        f"{path.stem} {name}"
        for path in records
        for name, code in json.loads(path.read_text()).items()
        if code["spills"]
        and code["registers"] >= min(250, (64 << 10) // (32 * code["warps"]))
        and not name.endswith("_place")  # a list of rows, not of values
    ]
    assert not spilling


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [80, 100])
def test_every_kernel_compiles_as_recorded(arch: int) -> None:
    """Compile in a separate process, because kernels are interpreted in this one."""
    if not (ROOT / RECORD / f"sm_{arch}-triton-{triton.__version__}.json").exists():
        pytest.skip("this Triton's machine code is not recorded")
    environment = {key: each for key, each in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "saccade_bench.lab.aot", "--all", "--arch", str(arch)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:]
    assert ("needs sm_89" in ended.stdout) == (arch < 89)


def test_every_kernel_that_is_launched_has_a_case() -> None:
    """Kernels are found in the text of modules, so that new modules are included."""
    looked_at: dict[str, set[str]] = {}
    for case in cases():
        looked_at.setdefault(case.module.__name__.rpartition(".")[2], set()).update(case.promises)
    for path in sorted((ROOT / "saccade" / "kernels" / "triton").glob("*.py")):
        assert launched_kernels(path.read_text()) == looked_at.get(path.stem, set()), path.name
    assert looked_at["paged"], "kernels are found at all"
