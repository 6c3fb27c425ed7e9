"""What start-up knows of kernels for a kind of device: found by plugins, read without PyTorch.

Owns the choice of backend. Operations are the backend's `Ops` (`kernels/ops.py`). A machine without
a plugin for its device computes by PyTorch (`kernels/reference/`).
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
"""Takes one of a backend's `towers` or "auto", a GPU's compute capability (90 for 9.0), and whether
the dtype has 16 bits. Returns the attention's name. Raises ConfigError.
"""


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """Kernels for a kind of device. Names are written "module:name"."""

    ops: str  # class of `Ops`
    ops_by_dtype: Mapping[str, str] = field(default_factory=dict)  # others, by a network's dtype
    packages: tuple[str, ...] = ()  # all that it needs
    machines: tuple[str, ...] = ()  # those it runs on, as `platform.machine` calls them; none: any
    towers: tuple[str, ...] = ("sdpa",)  # attention in the vision encoder by name
    pick_tower: PickTower | None = None  # default: the first of them
    workspaces: Mapping[str, int] = field(default_factory=dict)  # bytes by language attention
    remarks: Mapping[str, str] = field(default_factory=dict)  # what start-up adds, by the same
    resize: str | None = None
    """Function of (target, pixels, mode) that resizes as PyTorch does, without PyTorch. Returns
    False where it cannot.
    """
    step_graphs: str | None = None  # function like `runtime.graphs.OpenStepGraphs`
    pack_graphs: str | None = None  # function like `runtime.graphs.OpenPackGraphs`

    @property
    def installed(self) -> bool:
        """Return True if it runs on this machine. Imports none of its packages."""
        here = not self.machines or platform.machine() in self.machines
        return here and all(find_spec(package) is not None for package in self.packages)


@cache
def find_backend(device: str, *, installed: bool = True) -> KernelBackend | None:
    """Return the first backend for a kind of device, such as "cpu", or `None`.

    installed: only one that runs on this machine, or also one that start-up will refuse.
    """
    for plugin in plugins():
        if (name := dict(plugin.backends).get(device)) is not None:
            backend: KernelBackend = resolve_name(name)
            if backend.installed or not installed:
                return backend
    return None
