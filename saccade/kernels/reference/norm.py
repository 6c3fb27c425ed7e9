"""RMS norm and layer norm."""

from __future__ import annotations

import torch
from torch.nn import functional as F

FEW_VALUES = 4096
"""Up to this many values, the calls dominate the cost of PyTorch's RMS norm on a CPU, which is a
chain of ten operations (measured in decision 010).
"""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in x's dtype.

    It is computed in float32.

    weight: [D], or [H, D] if the last two dimensions of x are heads with separate weights. It has
        x's dtype, or float32 to round only the final result.
    """
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight, eps).to(x.dtype)
    if x.numel() <= FEW_VALUES:
        return _by_layer_norm(x, eps) * weight
    return whole_rms_norm(x, weight, eps)


def whole_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the same as `rms_norm`, computed with PyTorch's own function. Works for any size."""
    if weight.dtype != x.dtype:
        return whole_rms_norm(x.float(), weight, eps).to(x.dtype)
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` over the last dimension.

    It is computed in float32 and returned in x's dtype.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _by_layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x^2) + eps)`, computed in one PyTorch operation.

    This works because (x, -x) has mean 0 and variance mean(x^2).
    """
    size = x.shape[-1]
    return F.layer_norm(torch.cat((x, x.neg()), dim=-1), (2 * size,), eps=eps)[..., :size]
