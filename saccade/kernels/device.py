"""Where Triton's and Numba's kernels run in place of PyTorch's operations, and which GPUs have
FP8.
"""

from __future__ import annotations

import platform
from functools import cache
from importlib.util import find_spec

import torch

FIRST_FP8 = (8, 9)
"""Compute capability from which on a GPU converts from and to FP8."""


def has_fp8(device: torch.device) -> bool:
    """Whether kernels on a GPU read and write FP8. Asked when a model is loaded, never later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_FP8


def runs_triton(x: torch.Tensor) -> bool:
    """Whether work on `x` is a Triton kernel's."""
    return x.is_cuda


def runs_jit(x: torch.Tensor) -> bool:
    """Whether work on `x` is a Numba kernel's: those know bfloat16 on a CPU. In float32, PyTorch's
    own operations are what parity is promised of.
    """
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and has_numba()


@cache
def has_numba() -> bool:
    """Whether it is installed, and for a processor that its kernels were tried on."""
    return platform.machine() == "x86_64" and find_spec("numba") is not None
