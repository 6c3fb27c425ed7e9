"""Triton kernels to compile without a GPU, and requirements on their machine code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Promise:
    """The requirements on a launch's machine code.

    access: minimum bytes per thread of the widest loads and stores.
    stores: minimum for stores, if they are narrower.
    hgmma: matrix products use Hopper's instructions (16-bit values, sm_90).
    """

    access: int = 16
    stores: int = 16
    hgmma: bool = False


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Launches to inspect: `run` calls the host code of kernels in `module`. GPUs before
    `least_arch` lack the required instructions.
    """

    name: str
    module: ModuleType
    run: Callable[[], object]
    promises: Mapping[str, Promise]  # by the kernel's name
    least_arch: int = 0
