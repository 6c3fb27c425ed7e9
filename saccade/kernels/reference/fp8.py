"""Conversion to FP8, and matmuls with FP8 matrices, in plain PyTorch. The format is e4m3: four
exponent bits and three mantissa bits.

Small batches are not quantized: their cost is mostly reading the weights, which GPU kernels read in
8 bits. Large batches are quantized, with separate scales per row, on devices with FP8 matmuls
(`torch`'s scaled matmuls). The choice depends only on the batch size. Tensors are copied as bytes
because PyTorch has no index_copy_ for FP8.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from saccade.kernels import device
from saccade.kernels.matrix import FP8, MAX_UNQUANTIZED_ROWS, Fp8Experts, Fp8Matrix, Fp8Rows
from saccade.kernels.reference.linear import linear

LARGEST = 448.0
"""The largest value. Larger ones are clamped to it because the format has no infinity."""
BLOCK = 128
"""Rows and columns of weight blocks with one scale, as scaled matmuls require, and inputs per scale
of the quantized rows.
"""
MIN_AMOUNT = 1e-12
"""The minimum absolute maximum of a group for computing its scale, to avoid a division by 0."""
TRIED_ROWS = 2 * MAX_UNQUANTIZED_ROWS
"""Batch size of the matmul that tests whether a device supports FP8."""
ROWS_UNIT = 4
"""Rows are padded to a multiple of this, because cuBLAS reads their scales 16 bytes at a time."""


def to_fp8(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Return `x / scale` in FP8, rounded to nearest."""
    wide = x.float()
    return wide.div(scale).clamp_(-LARGEST, LARGEST).to(FP8)


def padded_rows(count: int) -> int:
    return -(-count // ROWS_UNIT) * ROWS_UNIT


def quantise_rows(x: torch.Tensor, group: int) -> Fp8Rows:
    """Quantize x [T, in] to FP8, with a scale for each group of `group` inputs in each row.

    The scale maps the largest absolute value of a group to the largest FP8 value.
    """
    parts = x.float().unflatten(1, (-1, group))
    scales = parts.abs().amax(2).clamp_(min=MIN_AMOUNT) / LARGEST
    values = to_fp8(parts, scales.unsqueeze(2)).flatten(1)
    more = padded_rows(len(x)) - len(x)
    padded = F.pad(values.view(torch.uint8), (0, 0, 0, more)).view(FP8)
    return Fp8Rows(padded, F.pad(scales.t(), (0, more)).contiguous().t(), group, len(x), x.dtype)


def prepare(matrix: Fp8Matrix, dtype: torch.dtype) -> Fp8Matrix:
    """Return the matrix prepared for rows of this dtype.

    It is `scaled` if PyTorch supports 8-bit matmuls with it, which this function finds out by
    executing one.
    """
    place = matrix.values.device
    if not device.multiplies_fp8(place, dtype):
        return matrix
    blocks = None
    if matrix.group == BLOCK != matrix.values.shape[1] and device.multiplies_blocks(place):
        blocks = block_scales(matrix.scales)
    scaled = replace(matrix, scaled=True, blocks=blocks)
    return scaled if scaled.rows_group() and _multiplies(scaled, dtype) else matrix


def _multiplies(matrix: Fp8Matrix, dtype: torch.dtype) -> bool:
    # On some GPUs with FP8, cuBLAS does not support a scale per row: sm_100, sm_110, sm_120
    # (pytorch/pytorch 160693, 192707).
    rows = torch.zeros(
        (TRIED_ROWS, matrix.values.shape[1]), dtype=dtype, device=matrix.values.device
    )
    try:
        scaled_linear(quantise_rows(rows, matrix.rows_group()), matrix, None)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError):
        return False
    return True


def block_scales(scales: torch.Tensor) -> torch.Tensor | None:
    """Return block scales [groups, out / 128] for cuBLAS, from scales [out, groups], or None.

    Groups are padded to a multiple of 4, and the scales of a block are contiguous. Returns None if
    the outputs in a block have different scales.
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
    """Return `x @ matrix.T + bias` [T, out] in x's dtype, for x [T, in], without quantizing x."""
    return linear(x, dense(matrix).to(x.dtype), bias)


def scaled_linear(rows: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `rows @ matrix.T + bias` with an FP8 matmul, for a `scaled` matrix.

    On a CPU, which has no block-scaled matmuls, both are dequantized.
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
    """Return the matrix, or the experts' matrices, dequantized to float32."""
    values, scales, group = matrix.values, matrix.scales, matrix.group
    return values.float() * scales.repeat_interleave(group, -1)[..., : values.shape[-1]]
