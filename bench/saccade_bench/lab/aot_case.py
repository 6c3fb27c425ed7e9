"""What is looked at of Triton kernels that are compiled without a GPU, and what each must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Promise:
    """What the machine code of a launch keeps.

    access: bytes that its widest loads and its widest stores have per thread at least; stores:
    these alone, where they are narrower. hgmma: whether its products are Hopper's own (16-bit
    values, sm_90).
    """

    access: int = 16
    stores: int = 16
    hgmma: bool = False


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Launches to be looked at: `run` calls the host code of kernels in `module`. least_arch:
    GPUs before that one have no instructions for them.
    """

    name: str
    module: ModuleType
    run: Callable[[], object]
    promises: Mapping[str, Promise]  # by the kernel's name
    least_arch: int = 0
