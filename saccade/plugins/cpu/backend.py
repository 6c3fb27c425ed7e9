"""Describes the backend for x86 CPUs to start-up and image workers. Does not import PyTorch."""

from __future__ import annotations

from saccade.kernels.backend import KernelBackend

BACKEND = KernelBackend(
    # float32 promises parity with PyTorch's operations, so only quantized matmuls use kernels.
    ops="saccade.plugins.cpu.quantized_ops:QuantizedOps",
    ops_by_dtype={"bfloat16": "saccade.plugins.cpu.ops:X86Ops"},
    packages=("numba", "llvmlite"),
    machines=("x86_64",),
    remarks={"x86": "; steps where that matters by PyTorch"},
    resize="saccade.plugins.cpu.antialias:resize",
)
