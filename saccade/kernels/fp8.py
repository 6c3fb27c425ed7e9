"""FP8 (e4m3: four bits of exponent, three of mantissa): what it holds, how values become it,
and products with matrices of it.

Owns what a product means in plain PyTorch. On a GPU it is `fp8_gpu.py`'s, where weights stay in 8
bits. PyTorch has no index_copy_ of such tensors: it is done with their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from saccade.kernels import device

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest value, of either sign. What is beyond becomes it: the format has no infinity."""
LEAST_GROUP = 16
"""Inputs that share a scale divide by this, as a product on tensor cores has so many at least."""


class Fp8Matrix(NamedTuple):
    """matrix[o, i] = values[o, i] * scales[o, i // group].

    values: FP8 [out, in]. scales: float32 [out, groups]. group: inputs that share a scale, divides
    by `LEAST_GROUP`; all of them where there is one group.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int


class Fp8Experts(NamedTuple):
    """Matrices of E experts, each as in an Fp8Matrix: values FP8 [E, out, in], scales float32
    [E, out, groups].
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int


def to_fp8(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """x / scale, rounded to the nearest."""
    wide = x.float()
    return wide.div(scale).clamp_(-LARGEST, LARGEST).to(FP8)


def put_rows(kept: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    """kept[places] = rows, in the dtype of `kept`; divided by `scale` where that is FP8."""
    if kept.dtype == FP8:
        kept.view(torch.uint8).index_copy_(0, places, to_fp8(rows, scale).view(torch.uint8))
    else:
        kept.index_copy_(0, places, rows)


def fp8_linear(
    x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, in] @ matrix.T + bias, [T, out] in the dtype of `x`."""
    if device.runs_triton(x):
        # Imported where there is a GPU: elsewhere Triton need not be installed.
        from saccade.kernels.fp8_gpu import launch_fp8

        return launch_fp8(x, matrix, bias)
    return F.linear(x, dense(matrix).to(x.dtype), bias)


def dense(matrix: Fp8Matrix | Fp8Experts) -> torch.Tensor:
    """The matrix, or the matrices, in float32."""
    values, scales, group = matrix
    return values.float() * scales.repeat_interleave(group, -1)[..., : values.shape[-1]]


def pad_fp8_outputs(matrix: Fp8Matrix, sizes: Sequence[int], more: int) -> Fp8Matrix:
    """The matrix, which is parts of so many outputs, with `more` outputs of 0 behind each."""
    values, scales = (
        torch.cat([F.pad(part, (0, 0, 0, more)) for part in each.split([*sizes])])
        for each in (matrix.values.view(torch.uint8), matrix.scales)
    )
    return matrix._replace(values=values.view(FP8), scales=scales)


def pad_fp8_inputs(matrix: Fp8Matrix, more: int) -> Fp8Matrix:
    """The matrix with `more` inputs, whose weights are 0."""
    values, scales, group = matrix
    inputs = values.shape[1]
    padded = F.pad(values.view(torch.uint8), (0, more)).view(FP8)
    if group == inputs:
        return matrix._replace(values=padded, group=inputs + more)
    groups = -(-(inputs + more) // group)
    return matrix._replace(
        values=padded, scales=F.pad(scales, (0, groups - scales.shape[1])).contiguous()
    )
