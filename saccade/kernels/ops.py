"""Chooses a model's kernels by device, by dtype, and by installed packages."""

from __future__ import annotations

from pkgutil import resolve_name

import torch

from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install
from saccade.kernels.backend import find_backend
from saccade.kernels.reference.ops import Ops


def pick_ops(place: torch.device, dtype: torch.dtype) -> Ops:
    """Return the kernels for a device. If no backend supports it, these are PyTorch's.

    Raises ConfigError for a GPU without a backend.
    """
    backend = find_backend(place.type)
    if backend is not None:
        name = backend.ops_by_dtype.get(str(dtype).removeprefix("torch."), backend.ops)
        ops: Ops = resolve_name(name)()
        return ops
    if place.type == "cuda":
        what = how_to_install(".[gpu]")
        raise ConfigError(f"--device {place.type}: no kernels are installed for it ({what})")
    return Ops()
