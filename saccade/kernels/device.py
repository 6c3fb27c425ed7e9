"""What a device can do, the code compiled for it, and copies to it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy.typing as npt
import torch

FIRST_FP8 = 89
"""GPU generation from which on numbers are converted from and to FP8."""
HOPPER = 90
FIRST_SMALL = 120
"""Generations from which on multiprocessors are small again: Blackwell's outside data centres."""


def has_fp8(device: torch.device) -> bool:
    """Return True if kernels on a GPU read and write FP8. Ask only while a model loads."""
    return device.type == "cuda" and generation(device) >= FIRST_FP8


@cache
def generation(device: torch.device) -> int:
    """Return the GPU generation whose tiles kernels take: compute capability times ten.

    Interpreted kernels take Hopper's.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; an H100's count where kernels are interpreted."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def has_room(device: torch.device) -> bool:
    """Return True if a multiprocessor has 227 KB of shared memory.

    Data centre GPUs have it from Hopper on. Elsewhere a kernel may have 99 KB.
    """
    return HOPPER <= generation(device) < FIRST_SMALL


def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if PyTorch multiplies FP8 by FP8 on the device, giving values in the dtype.

    Each row on either side has a scale. Ask while a model loads.
    """
    return has_fp8(device) and dtype == torch.bfloat16


def multiplies_blocks(device: torch.device) -> bool:
    """Return True if FP8 products may have scales in blocks. PyTorch asks for Hopper."""
    return is_hopper(device)


def is_hopper(device: torch.device) -> bool:
    """Return True if a warp group multiplies from shared memory into registers."""
    return HOPPER <= generation(device) < HOPPER + 10


def send(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `array` to the device for work on the current stream, without making the host wait.

    On a CPU the result is the array's own memory.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory a copy would wait for all that the stream was given before.
    return tensor.pin_memory().to(device, non_blocking=True)
