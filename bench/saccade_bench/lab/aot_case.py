"""What is looked at of Triton kernels that are compiled without a GPU, and what each must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Promise:
    """The demands on a launch's machine code.

    access: bytes per thread of its widest loads and stores, at least; stores: the same of narrower
    stores. hgmma: its products are Hopper's own (16-bit values, sm_90).
    """

    access: int = 16
    stores: int = 16
    hgmma: bool = False


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Launches to inspect: `run` calls the host code of kernels in `module`. least_arch: earlier
    GPUs lack the instructions.
    """

    name: str
    module: ModuleType
    run: Callable[[], object]
    promises: Mapping[str, Promise]  # by the kernel's name
    least_arch: int = 0
