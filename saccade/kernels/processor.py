"""The instructions that kernels may use on this processor.

PyTorch's own switch hides them from all kernels: `ATEN_CPU_CAPABILITY=avx2` simulates a CPU
without AVX-512. oneDNN has its own switch, `ONEDNN_MAX_CPU_ISA=AVX2`.
"""

from __future__ import annotations

import platform
from functools import cache

import torch


@cache
def has_avx512() -> bool:
    """Return True if vectors may have 512 bits."""
    return (
        platform.machine() == "x86_64"
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and bool(torch.cpu._is_avx512_supported())
    )


@cache
def has_vnni() -> bool:
    """Return True if 8-bit products are summed without overflow."""
    return has_avx512() and bool(torch.cpu._is_vnni_supported())


@cache
def has_bf16() -> bool:
    """Return True if bfloat16 numbers are multiplied in pairs."""
    return has_avx512() and bool(torch.cpu._is_avx512_bf16_supported())


def runs_int8() -> bool:
    """Return True if this processor sums 8-bit products without overflow, and torch has the kernel.

    The processor needs VNNI or AMX.
    """
    return has_vnni() and torch.backends.mkldnn.is_available()
