"""The backend for x86 processors, as start-up and image workers know it: without PyTorch."""

from __future__ import annotations

from saccade.kernels.backend import KernelBackend

BACKEND = KernelBackend(
    # In float32, parity is promised with PyTorch's own operations.
    ops="saccade.plugins.cpu.quantized_ops:QuantizedOps",
    ops_by_dtype={"bfloat16": "saccade.plugins.cpu.ops:X86Ops"},
    packages=("numba", "llvmlite"),
    machines=("x86_64",),
    remarks={"x86": "; steps where that matters by PyTorch"},
    resize="saccade.plugins.cpu.antialias:resize",
)
