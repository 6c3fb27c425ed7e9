"""Describes the kernel backends that plugins provide for each type of device, without importing
PyTorch.

A backend's operations are its `Ops` (`kernels/ops.py`). If no plugin provides a backend for the
device, PyTorch's operations are used (`kernels/reference/`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name

from saccade.plugins import plugins

PickTower = Callable[[str, int, bool], str]
"""Chooses the vision encoder's attention. Takes one of a backend's `towers` or "auto", a GPU's
compute capability (90 for 9.0), and whether the dtype has 16 bits. Raises ConfigError.
"""


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """The kernels for a type of device. Names of objects to import are written "module:name"."""

    ops: str  # class of `Ops`
    ops_by_dtype: Mapping[str, str] = field(default_factory=dict)  # overrides, by dtype
    packages: tuple[str, ...] = ()  # packages that it requires
    machines: tuple[str, ...] = ()  # supported values of `platform.machine()`; empty: all
    towers: tuple[str, ...] = ("sdpa",)  # attention backends of the vision encoder
    pick_tower: PickTower | None = None  # None: the first of `towers`
    workspaces: Mapping[str, int] = field(default_factory=dict)  # bytes by language attention
    remarks: Mapping[str, str] = field(
        default_factory=dict
    )  # start-up messages, by language attention
    resize: str | None = None
    """Function of (target, pixels, mode) that resizes like PyTorch, without importing it. Returns
    False if it does not support the mode.
    """
    step_graphs: str | None = None  # a `runtime.graphs.OpenStepGraphs`
    pack_graphs: str | None = None  # a `runtime.graphs.OpenPackGraphs`

    @property
    def installed(self) -> bool:
        """True if the backend can run on this machine. Its packages are not imported to find
        out.
        """
        here = not self.machines or platform.machine() in self.machines
        return here and all(find_spec(package) is not None for package in self.packages)


@cache
def find_backend(device: str, *, installed: bool = True) -> KernelBackend | None:
    """Return the first backend for a type of device, such as "cpu", or None.

    installed: True to only return a backend that can run on this machine.
    """
    for plugin in plugins():
        if (name := dict(plugin.runtime.backends).get(device)) is not None:
            backend: KernelBackend = resolve_name(name)
            if backend.installed or not installed:
                return backend
    return None
