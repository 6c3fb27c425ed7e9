"""8-bit matmuls on a CPU. Matrices have a scale per output, and rows are quantized dynamically with
a scale each. Matrices that are quantized at load are Hadamard-transformed first, as are the rows
that are multiplied by them (`hadamard.py`).

A matmul reads half the bytes of bfloat16. Its sums are integers, so results are batch-invariant.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from saccade.kernels.matrix import Int8Matrix, Matrix
from saccade.kernels.reference.hadamard import MIN_BLOCK, block_of, transform, transform_back

LARGEST = 127
"""The largest absolute value of a quantized row."""
MIN_SCALE = 1e-30
"""The scale of rows that are all zeros, to avoid a division by 0."""
ZERO = 128
"""The zero point of quantized rows. They are unsigned because oneDNN is fast for unsigned rows on
every CPU with VNNI, but for signed ones only with AMX.
"""
BLOCK_VALUES = 1 << 17
"""Values quantized at a time, so that intermediate results stay in a core's cache."""


def quantise_matrix(weight: torch.Tensor) -> Int8Matrix:
    """Transform and quantize `weight` [out, in], with a scale from the largest value of each
    output.
    """
    outputs, inputs = weight.shape
    whole = -(-inputs // MIN_BLOCK) * MIN_BLOCK
    values = torch.empty(outputs, whole, dtype=torch.int8)
    scales = torch.empty(outputs)
    step = max(1, BLOCK_VALUES // max(1, inputs))
    for rows, target, scale in zip(weight.split(step), values.split(step), scales.split(step)):
        wide = transform(rows).div_(block_of(whole))
        torch.div(wide.abs().amax(1), LARGEST, out=scale)
        target.copy_(wide.div_(scale.clamp_min(MIN_SCALE).unsqueeze(1)).round_())
    return Int8Matrix(values, scales, transformed=True)


def restore_matrix(matrix: Int8Matrix, inputs: int) -> torch.Tensor:
    """Return a matrix that is not packed, dequantized to float32 [out, in]."""
    whole = matrix.values.float().mul_(matrix.scales.unsqueeze(1))
    return transform_back(whole, inputs) if matrix.transformed else whole


def prepack_int8(matrix: Int8Matrix) -> Matrix:
    """Return `matrix` packed for `int8_linear`. Other functions cannot read it."""
    return replace(matrix, values=torch.ops.onednn.qlinear_prepack(matrix.values, None))


def quantise_rows(x: torch.Tensor, transformed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to uint8 [T, in] with zero point `ZERO`, and float32 scales [T, 1].

    transformed: True to apply the Hadamard transform first, which pads rows to complete blocks.
    """
    count = max(1, BLOCK_VALUES // max(1, x.shape[1]))
    if x.shape[0] <= count:
        return _quantise_block(x, transformed)
    made = [_quantise_block(rows, transformed) for rows in x.split(count)]
    values, scales = zip(*made)
    return torch.cat(values), torch.cat(scales)


def _quantise_block(x: torch.Tensor, transformed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    wide = transform(x) if transformed else x.float()
    scales = wide.abs().amax(-1, keepdim=True).div_(LARGEST).clamp_min_(MIN_SCALE)
    # PyTorch converts to int8 four times as fast as to uint8. Flipping the top bit adds `ZERO`.
    signed = (wide / scales).round_().to(torch.int8)
    return signed.view(torch.uint8).bitwise_xor_(ZERO), scales


def int8_linear(
    x: torch.Tensor,
    matrix: Int8Matrix,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `x @ matrix.T + bias` [T, out], for x [T, in] and a matrix from `prepack_int8`.

    dtype: the dtype of the result, or None for x's dtype.
    """
    rows, scales = quantise_rows(x, matrix.transformed)
    products: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        rows,
        1.0,
        ZERO,
        matrix.values,
        matrix.scales,
        None,  # zero points of the matrix
        None,  # a bias would be added before the rows' scales
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return _scale(products, scales, bias, dtype or x.dtype)


def int8_linear_reference(
    x: torch.Tensor, matrix: Int8Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the same as `int8_linear`, for a matrix that is not packed. For tests."""
    rows, scales = quantise_rows(x, matrix.transformed)
    sums = (rows.long() - ZERO) @ matrix.values.long().t()
    return _scale(sums.float() * matrix.scales, scales, bias, x.dtype)


def _scale(
    products: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if dtype != products.dtype and bias is None:
        return torch.mul(products, scales, out=torch.empty(products.shape, dtype=dtype))
    products.mul_(scales)
    return products if bias is None else products.add_(bias).to(dtype)
