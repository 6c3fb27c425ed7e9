"""Detects GPU properties that kernels depend on, and copies arrays to devices."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy.typing as npt
import torch

FIRST_FP8 = 89
"""GPU generation from which on values can be converted to and from FP8."""
HOPPER = 90
FIRST_SMALL = 120
"""GPU generation from which on shared memory is small again: Blackwell outside data centers."""


def has_fp8(device: torch.device) -> bool:
    """Return True if kernels on this GPU support FP8. This is slow: call it only while a model
    loads.
    """
    return device.type == "cuda" and generation(device) >= FIRST_FP8


@cache
def generation(device: torch.device) -> int:
    """Return the GPU generation for which kernels choose tiles: ten times the compute capability.

    Kernels that are interpreted on a CPU use Hopper's tiles.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or of an H100 if kernels are interpreted."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def has_room(device: torch.device) -> bool:
    """Return True if a kernel can use 227 KB of shared memory.

    Data center GPUs have that since Hopper. Others have 99 KB.
    """
    return HOPPER <= generation(device) < FIRST_SMALL


def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if PyTorch supports FP8 matmuls with one scale per row and per output on this
    device.

    This is slow: call it only while a model loads.

    dtype: the dtype of the result.
    """
    return has_fp8(device) and dtype == torch.bfloat16


def multiplies_blocks(device: torch.device) -> bool:
    """Return True if FP8 matmuls support block scales, which PyTorch implements for Hopper."""
    return is_hopper(device)


def is_hopper(device: torch.device) -> bool:
    """Return True if the GPU has Hopper's warp group matmuls (wgmma)."""
    return HOPPER <= generation(device) < HOPPER + 10


def send(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `array` to the device on the current stream, without blocking the host.

    On a CPU the result shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from pageable memory would wait for all earlier work on the stream.
    return tensor.pin_memory().to(device, non_blocking=True)
