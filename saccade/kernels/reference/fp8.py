"""FP8 (e4m3: four bits of exponent, three of mantissa): what it holds, how values become it,
and products with matrices of it.

Owns what a product means in plain PyTorch, and which form of it is taken. Few rows stay as they
are: what they cost is the weights' way, and `triton/fp8.py` reads these in 8 bits. Many rows become
8 bits too, each with scales of its own, where the device multiplies these (`torch`'s scaled
products): a row's answer depends on how many rows a product has, never on what is in the others.
PyTorch has no index_copy_ of such tensors: it is done with their bytes.
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
BLOCK = 128
"""Rows and columns of the blocks of weights that scaled products take, and inputs of a row that
then share a scale.
"""
FEW_ROWS = 16
"""Rows of a product up to which they are not made 8 bits: a review's estimate of where cuBLAS is as
fast as a kernel of our own, not measured; `gpu-check`'s stage `products` is to set it.
"""
LEAST_AMOUNT = 1e-12
"""A group of smaller values than that has the scale of one with this value."""
ROWS_UNIT = 4
"""cuBLAS reads scales of rows 16 bytes at a time: rows are padded to a multiple of this."""


class Fp8Matrix(NamedTuple):
    """matrix[o, i] = values[o, i] * scales[o, i // group].

    values: FP8 [out, in]. scales: float32 [out, groups]. group: inputs that share a scale, divides
    by `LEAST_GROUP`; all of them where there is one group. scaled: whether products of many rows
    may take these in 8 bits; blocks: what they then read of weights that have scales in blocks,
    from `block_scales`.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int
    scaled: bool = False
    blocks: torch.Tensor | None = None


class Fp8Rows(NamedTuple):
    """rows[t, i] = values[t, i] * scales[t, i // group] for the first `rows` rows; others pad, and
    hold anything.

    values: FP8 [R, in]. scales: float32 [R, groups], the rows of one group back to back. dtype:
    what the rows were, and what products of them are.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int
    rows: int
    dtype: torch.dtype

    def dense(self) -> torch.Tensor:
        """The rows in float32."""
        wide = self.values.float() * self.scales.repeat_interleave(self.group, 1)
        return wide[: self.rows]


Rows = torch.Tensor | Fp8Rows
"""What a product takes: [T, in]."""


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


def padded_rows(count: int) -> int:
    return -(-count // ROWS_UNIT) * ROWS_UNIT


def quantise_rows(x: torch.Tensor, group: int) -> Fp8Rows:
    """x [T, in] in 8 bits, with a scale for each `group` inputs of each row, so that the largest of
    them becomes the largest there is.
    """
    parts = x.float().unflatten(1, (-1, group))
    scales = parts.abs().amax(2).clamp_(min=LEAST_AMOUNT) / LARGEST
    values = to_fp8(parts, scales.unsqueeze(2)).flatten(1)
    more = padded_rows(len(x)) - len(x)
    padded = F.pad(values.view(torch.uint8), (0, 0, 0, more)).view(FP8)
    return Fp8Rows(padded, F.pad(scales.t(), (0, more)).t(), group, len(x), x.dtype)


def rows_group(matrix: Fp8Matrix) -> int:
    """Inputs of a row that share a scale, where products of many rows take these in 8 bits; else
    0.
    """
    outputs, inputs = matrix.values.shape
    if not matrix.scaled or outputs % LEAST_GROUP or inputs % LEAST_GROUP:
        return 0
    return matrix.group if matrix.group == inputs or matrix.blocks is not None else 0


def prepare(matrix: Fp8Matrix, dtype: torch.dtype) -> Fp8Matrix:
    """The matrix, for products with rows of that dtype: `scaled` where its device has them."""
    place = matrix.values.device
    if not device.multiplies_fp8(place, dtype):
        return matrix
    if matrix.group != BLOCK or matrix.group == matrix.values.shape[1]:
        return matrix._replace(scaled=True)
    blocks = block_scales(matrix.scales) if device.multiplies_blocks(place) else None
    return matrix._replace(scaled=blocks is not None, blocks=blocks)


def block_scales(scales: torch.Tensor) -> torch.Tensor | None:
    """Of scales [out, groups], those of blocks of outputs [groups, out / 128], as cuBLAS reads
    them: groups padded to a multiple of 4, and those of one block back to back. None where the
    outputs of a block have different ones.
    """
    if scales.shape[0] % BLOCK:
        return None
    each = scales.unflatten(0, (-1, BLOCK))
    if not torch.equal(each, each[:, :1].expand_as(each)):
        return None
    return F.pad(each[:, 0], (0, -scales.shape[1] % 4)).contiguous().t()


def whole_linear(
    x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, in] @ matrix.T + bias, [T, out] in the dtype of `x`, rows being as they are."""
    return F.linear(x, dense(matrix).to(x.dtype), bias)


def scaled_linear(rows: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """rows @ matrix.T + bias, both sides being 8 bits; for a matrix that is `scaled`.

    NOT YET RUN on a GPU; a CPU has no product by blocks.
    """
    weights = matrix.values.t()
    if matrix.blocks is None:
        out: torch.Tensor = torch._scaled_mm(
            rows.values,
            weights,
            scale_a=rows.scales[:, 0].unsqueeze(1),  # whose stride is 1
            scale_b=matrix.scales.t(),
            bias=bias,
            out_dtype=rows.dtype,
        )
    elif rows.values.device.type == "cpu":
        wide = None if bias is None else bias.float()
        return F.linear(rows.dense(), dense(matrix), wide).to(rows.dtype)
    else:
        kinds = F.ScalingType
        out = F.scaled_mm(
            rows.values,
            weights,
            rows.scales,
            kinds.BlockWise1x128,
            matrix.blocks,
            kinds.BlockWise128x128,
            output_dtype=rows.dtype,
        )
        out = out if bias is None else out.add_(bias)
    return out[: rows.rows]


def dense(matrix: Fp8Matrix | Fp8Experts) -> torch.Tensor:
    """The matrix, or the matrices, in float32."""
    values, scales, group = matrix.values, matrix.scales, matrix.group
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
    values, scales, group = matrix.values, matrix.scales, matrix.group
    inputs = values.shape[1]
    padded = F.pad(values.view(torch.uint8), (0, more)).view(FP8)
    if group == inputs:
        return matrix._replace(values=padded, group=inputs + more)
    groups = -(-(inputs + more) // group)
    return matrix._replace(
        values=padded, scales=F.pad(scales, (0, groups - scales.shape[1])).contiguous()
    )
