"""Matmuls with dense weights, followed by an activation.

On x86 CPUs weights are packed in oneDNN's blocked format, and the activation is fused into the
matmul. Packing at load avoids reordering in each call. This matters most for small batches
(decision 003). CPUs without instructions for 16-bit dtypes multiply them in float32.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import DenseMatrix, Matrix
from saccade.kernels.reference.activation import Activation, activate

ROWS_FORESEEN = 1024
"""oneDNN optimizes its packed format for this batch size. Other sizes work, and are as fast."""
MIN_VALUES = 160_000
"""Float32 weights with fewer values are not packed: for one row, calling oneDNN takes longer than
the matmul (measured in decision 003).
"""
MIN_WIDENED_ROWS = 6
"""On a CPU without instructions for a 16-bit dtype, a matmul of this many rows or more takes longer
than a float32 matmul including the conversion of the weight (decision 007).
"""
WIDENED_VALUES = 1 << 19
"""Number of weight values converted to float32 at a time. They fit in the second-level cache."""
PADDED = ("cuda",)
UNIT = 64
"""Devices whose matmuls need slices padded to a multiple of UNIT values: cuBLAS does not use its
Hopper kernels unless rows are a multiple of 16 bytes, and its tiles have at least 64 values.
"""
FUSED: dict[Activation, tuple[str, str]] = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}
"""oneDNN's names: (operation, algorithm)."""


def missing(values: int, device: torch.device) -> int:
    """Return how many zeros a slice with this many values must be padded with on the device."""
    return -values % UNIT if device.type in PADDED else 0


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [out, in] in the fastest format for `dense_linear`, which PyTorch may not be
    able to read otherwise.
    """
    if not _packs(weight):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight.contiguous(), ROWS_FORESEEN
    )
    return packed


def prepack_dense(matrix: DenseMatrix) -> Matrix:
    """Return the matrix with its values packed by `pack`."""
    return DenseMatrix(pack(matrix.values))


def _packs(weight: torch.Tensor) -> bool:
    if (
        weight.device.type != "cpu"
        or platform.machine() != "x86_64"
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    if weight.dtype == torch.bfloat16:
        return has_instructions(weight.dtype)
    return weight.dtype == torch.float32 and weight.numel() >= MIN_VALUES


@cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Return True unless this is an x86 CPU without instructions for matmuls of a 16-bit dtype."""
    if platform.machine() != "x86_64":
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` [..., out].

    If the CPU has no instructions for a 16-bit dtype, larger batches are multiplied in float32, and
    each output is rounded once.
    """
    if not _widens(x):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).float()
    out = x.new_empty((len(rows), len(weight)))
    size = max(1, WIDENED_VALUES // weight.shape[1])
    for start in range(0, len(weight), size):
        part = slice(start, start + size)
        shift = None if bias is None else bias[part].float()
        out[:, part] = F.linear(rows, weight[part].float(), shift)
    return out.unflatten(0, x.shape[:-1])


def _widens(x: torch.Tensor) -> bool:
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.device.type == "cpu"
        and x.numel() >= MIN_WIDENED_ROWS * x.shape[-1]
        and not has_instructions(x.dtype)
    )


def dense_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = "none",
) -> torch.Tensor:
    """Return `activation(x @ weight.T + bias)` [..., out] with a weight from `pack`."""
    if not weight.is_mkldnn:
        y = linear(x, weight, bias)
        return y if activation == "none" else activate(y, activation)
    fused = FUSED.get(activation)
    operation, algorithm = fused or FUSED["none"]
    y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, operation, [], algorithm)
    return y if fused else activate(y, activation)
