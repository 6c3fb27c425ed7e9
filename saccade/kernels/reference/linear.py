"""Products with weight matrices, and the activation after them.

On x86 processors a weight is kept in oneDNN's blocks, and the activation is applied where the
product is made. So calls skip any reordering, which counts most for few rows (decision 003).
Stateless.
"""

from __future__ import annotations

import platform

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import DenseMatrix, Matrix
from saccade.kernels.reference.activation import Activation, activate

ROWS_FORESEEN = 1024
"""oneDNN chooses its blocks for products of so many rows; others are right too, and as fast."""
MIN_VALUES = 160_000
"""A float32 weight of fewer values stays as it is: for one row, the call of oneDNN takes longer
than the product (measured: decision 003).
"""
PADDED = ("cuda",)
UNIT = 64
"""Devices whose products want slices of whole units, in values: cuBLAS leaves its Hopper kernels
for rows that are no multiple of 16 bytes, and its tiles are of 64 and more.
"""
FUSED: dict[Activation, tuple[str, str]] = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}
"""What oneDNN calls them: (operation, algorithm)."""


def missing(values: int, device: torch.device) -> int:
    """Return how many zeros products on that device want after a slice with this many values."""
    return -values % UNIT if device.type in PADDED else 0


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [out, in] in the form fastest for products. Only products can read it."""
    if not _packs(weight):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight.contiguous(), ROWS_FORESEEN
    )
    return packed


def prepack_dense(matrix: DenseMatrix) -> Matrix:
    """Return the matrix with packed values."""
    return DenseMatrix(pack(matrix.values))


def _packs(weight: torch.Tensor) -> bool:
    if (
        weight.device.type != "cpu"
        or platform.machine() != "x86_64"
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and weight.numel() >= MIN_VALUES


def dense_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = "none",
) -> torch.Tensor:
    """Return `activation(x @ weight.T + bias)` [..., out] with a weight from `pack`."""
    if not weight.is_mkldnn:
        y = F.linear(x, weight, bias)
        return y if activation == "none" else activate(y, activation)
    fused = FUSED.get(activation)
    operation, algorithm = fused or FUSED["none"]
    y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, operation, [], algorithm)
    return y if fused else activate(y, activation)
