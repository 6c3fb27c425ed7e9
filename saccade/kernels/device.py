"""Where Triton's kernels run in place of PyTorch's operations. Owns that one decision."""

from __future__ import annotations

import torch


def runs_triton(x: torch.Tensor) -> bool:
    """Whether work on `x` is a Triton kernel's."""
    return x.is_cuda
