"""Root-mean-square normalisation. Owns nothing."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from saccade.kernels import device

FEW_VALUES = 4096
"""On a CPU, PyTorch's RMS norm is a chain of ten operations, whose calls are all that a few values
cost (measured: LOG.md).
"""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32, in the dtype
    of `x`.

    weight: [D], or [H, D] where the last two dimensions of `x` are heads that have weights of their
    own; of the dtype of `x`, or float32, with which the product is rounded once.
    """
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight, eps).to(x.dtype)
    if weight.dim() == 1 and device.runs_jit(x) and x.is_contiguous():
        # Imported where it runs: elsewhere Numba need not be installed.
        from saccade.kernels.x86.layer import compiled_rms_norm

        return compiled_rms_norm(x, None, weight, eps)[1]
    if x.device.type == "cpu" and x.numel() <= FEW_VALUES:
        return _by_layer_norm(x, eps) * weight
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """rms_norm(x) * silu(gate) over the last dimension, in the dtype of `x`; the gate in
    float32.
    """
    return (rms_norm(x, weight, eps) * F.silu(gate.float())).to(x.dtype)


def _by_layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) in one operation that PyTorch has: (x, -x) has the mean 0 and the
    variance mean(x^2).
    """
    size = x.shape[-1]
    return F.layer_norm(torch.cat((x, x.neg()), dim=-1), (2 * size,), eps=eps)[..., :size]
