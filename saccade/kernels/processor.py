"""Detects the CPU instructions that kernels may use.

PyTorch's switch applies to all kernels: `ATEN_CPU_CAPABILITY=avx2` simulates a CPU without AVX-512.
oneDNN has a separate switch, `ONEDNN_MAX_CPU_ISA=AVX2`.
"""

from __future__ import annotations

import platform
from functools import cache

import torch


@cache
def has_avx512() -> bool:
    """Return True if the CPU supports AVX-512."""
    return (
        platform.machine() == "x86_64"
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and bool(torch.cpu._is_avx512_supported())
    )


@cache
def has_vnni() -> bool:
    """Return True if the CPU can sum 8-bit products without overflow (VNNI)."""
    return has_avx512() and bool(torch.cpu._is_vnni_supported())


@cache
def has_bf16() -> bool:
    """Return True if the CPU has bfloat16 dot products (AVX-512 BF16)."""
    return has_avx512() and bool(torch.cpu._is_avx512_bf16_supported())


def runs_int8() -> bool:
    """Return True if PyTorch has 8-bit kernels that this CPU runs without overflow.

    The CPU needs VNNI or AMX.
    """
    return has_vnni() and torch.backends.mkldnn.is_available()
