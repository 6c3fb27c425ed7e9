"""Normalization layers."""

from __future__ import annotations

import torch

from saccade.kernels.matrix import Rows
from saccade.nn.weights import Part, Weights


class RMSNorm:
    """Divides values by their root mean square over the last dimension."""

    __slots__ = ("eps", "ops", "weight")

    def __init__(
        self, weights: Weights, name: str, size: int, eps: float, *, around_one: bool = False
    ) -> None:
        """Load the weights.

        around_one: True if the checkpoint stores the weights minus 1. The weights are then stored
            in float32 because 16 bits would lose most of the checkpoint's precision.
        """
        weight = weights.load(Part(f"{name}.weight", (size,)))
        self.weight = weight.float() + 1.0 if around_one else weight
        self.eps = eps
        self.ops = weights.ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta, and the norm of this sum."""
        return self.ops.add_rms_norm(x, delta, self.weight, self.eps)

    def add_rows(
        self, x: torch.Tensor, delta: torch.Tensor, group: int
    ) -> tuple[torch.Tensor, Rows]:
        """Return x + delta, and the norm of this sum in the format that a matrix with `group`
        takes.

        group: the `group` of the next `Linear`.
        """
        return self.ops.add_rms_norm_rows(x, delta, self.weight, self.eps, group)


class LayerNorm:
    """Normalizes mean and variance over the last dimension."""

    __slots__ = ("bias", "eps", "ops", "weight")

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.load(Part(f"{name}.weight", (size,)))
        self.bias = weights.load(Part(f"{name}.bias", (size,)))
        self.eps = eps
        self.ops = weights.ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta, and the norm of this sum."""
        return self.ops.add_layer_norm(x, delta, self.weight, self.bias, self.eps)
