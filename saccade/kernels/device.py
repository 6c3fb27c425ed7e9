"""Where Triton's kernels run in place of PyTorch's operations, and which GPUs have FP8."""

from __future__ import annotations

import torch

FIRST_FP8 = (8, 9)
"""Compute capability from which on a GPU converts from and to FP8."""


def has_fp8(device: torch.device) -> bool:
    """Whether kernels on a GPU read and write FP8. Asked when a model is loaded, never later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_FP8


def runs_triton(x: torch.Tensor) -> bool:
    """Whether work on `x` is a Triton kernel's."""
    return x.is_cuda
