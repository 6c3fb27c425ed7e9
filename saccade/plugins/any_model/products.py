"""Replaces transformers' linear layers with ones that use Saccade's packed weights and matrix
multiplication.

The code is the same for all models.
"""

from __future__ import annotations

from typing import Any

import torch

from saccade.kernels.matrix import DenseMatrix, Matrix
from saccade.kernels.reference.ops import Ops


class PackedLinear(torch.nn.Module):
    """A replacement for `torch.nn.Linear` with packed weights."""

    def __init__(self, layer: torch.nn.Linear, matrix: Matrix, ops: Ops) -> None:
        """Replace `layer`, whose weights were loaded as `matrix`."""
        super().__init__()
        self.matrix = matrix
        self.bias = layer.bias
        self.ops = ops
        self.out_features, self.in_features = layer.out_features, layer.in_features

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out, in]. It is unpacked at each access."""
        return self.matrix.dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix.multiply(self.ops, x, self.bias)


def pack(model: Any, head: Any, ops: Ops) -> None:
    """Replace the linear layers for which packed weights are faster.

    head: the output head, which is not replaced.
    """
    for inner in list(model.modules()):
        for name, layer in list(inner.named_children()):
            if type(layer) is not torch.nn.Linear or layer is head:
                continue
            matrix = DenseMatrix(layer.weight.detach()).ready(ops)
            if not isinstance(matrix, DenseMatrix) or matrix.values.is_mkldnn:
                setattr(inner, name, PackedLinear(layer, matrix, ops))
