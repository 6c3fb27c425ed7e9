"""Activations for which PyTorch's own CPU loop is slow. Owns nothing."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU with the tanh approximation, computed in float32, in the dtype of `x`.

    With 0.5 (1 + tanh(z)) = sigmoid(2 z) it is x * sigmoid(SLOPE * (x + 0.044715 x^3)): on a CPU
    half the time of torch's.
    """
    if x.is_cuda:
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    gate = (wide * wide).mul_(0.044715 * SLOPE).add_(SLOPE).mul_(wide).sigmoid_()
    return gate.mul_(wide).to(x.dtype)
