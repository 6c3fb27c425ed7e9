"""The one choice of kernels: by the device and the dtype that a model is loaded for, and what is
installed there.
"""

from __future__ import annotations

import torch

from saccade.kernels.device import has_numba
from saccade.kernels.reference.ops import Ops


def pick_ops(place: torch.device, dtype: torch.dtype) -> Ops:
    """Return the kernels for the device: Triton's on a GPU.

    On a CPU these are Numba's for bfloat16, where it is installed, and PyTorch's otherwise. In
    float32, parity is promised with PyTorch's own operations.
    """
    if place.type == "cuda":
        # Imported where it runs, as the other is: elsewhere its package need not be installed.
        from saccade.kernels.triton.ops import TritonOps

        return TritonOps()
    if dtype == torch.bfloat16 and has_numba():
        from saccade.kernels.x86.ops import X86Ops

        return X86Ops()
    return Ops()
