"""Where Triton's kernels run in place of PyTorch's operations, and what a GPU can do."""

from __future__ import annotations

from functools import cache

import torch

FIRST_FP8 = (8, 9)
"""Compute capability from which on a GPU converts from and to FP8."""
HOPPER = 90
FIRST_SMALL = 120
"""Generations from which on multiprocessors are small again: Blackwell's outside data centres."""


def has_fp8(device: torch.device) -> bool:
    """Whether kernels on a GPU read and write FP8. Asked when a model is loaded, never later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_FP8


@cache
def generation(device: torch.device) -> int:
    """Which GPUs' tiles kernels take there: compute capability times ten; Hopper's where kernels
    are interpreted.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_room(device: torch.device) -> bool:
    """Whether a multiprocessor has 227 KB of shared memory, as data centres' have from Hopper on;
    else a kernel may have 99 KB.
    """
    return HOPPER <= generation(device) < FIRST_SMALL


def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies FP8 by FP8 there, with a scale for each row of either, to values
    of that dtype. Asked when a model is loaded.
    """
    return has_fp8(device) and dtype == torch.bfloat16


def multiplies_blocks(device: torch.device) -> bool:
    """Whether such products may have scales in blocks: PyTorch asks for Hopper."""
    return HOPPER <= generation(device) < HOPPER + 10


def runs_triton(x: torch.Tensor) -> bool:
    """Whether work on `x` is a Triton kernel's."""
    return x.is_cuda
