"""FP8 (e4m3: four exponent bits, three mantissa bits): its range, how values are converted, and
products with FP8 matrices.

Owns what a product means in plain PyTorch, and the choice of its form. Few rows stay unchanged:
their cost is reading the weights, and a GPU's kernel reads them in 8 bits. Many rows become 8
bits too, each with own scales, on devices that multiply FP8 (`torch`'s scaled products). A row's
answer depends on how many rows a product has, never on their content. PyTorch lacks index_copy_ for
such tensors: their bytes are copied.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from saccade.kernels import device
from saccade.kernels.matrix import FP8, MAX_UNQUANTIZED_ROWS, Fp8Experts, Fp8Matrix, Fp8Rows

LARGEST = 448.0
"""Largest value, of either sign. What is beyond becomes it: the format has no infinity."""
BLOCK = 128
"""Rows and columns of the blocks of weights that scaled products take, and inputs of a row that
then share a scale.
"""
MIN_AMOUNT = 1e-12
"""A group of smaller values than that has the scale of one with this value."""
TRIED_ROWS = 2 * MAX_UNQUANTIZED_ROWS
"""Rows of the product that tells whether a device multiplies in 8 bits."""
ROWS_UNIT = 4
"""cuBLAS reads scales of rows 16 bytes at a time: rows are padded to a multiple of this."""


def to_fp8(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Return `x / scale`, rounded to the nearest."""
    wide = x.float()
    return wide.div(scale).clamp_(-LARGEST, LARGEST).to(FP8)


def padded_rows(count: int) -> int:
    return -(-count // ROWS_UNIT) * ROWS_UNIT


def quantise_rows(x: torch.Tensor, group: int) -> Fp8Rows:
    """Quantise x [T, in] to 8 bits, with a scale for each `group` inputs in each row.

    A group's largest value becomes FP8's largest.
    """
    parts = x.float().unflatten(1, (-1, group))
    scales = parts.abs().amax(2).clamp_(min=MIN_AMOUNT) / LARGEST
    values = to_fp8(parts, scales.unsqueeze(2)).flatten(1)
    more = padded_rows(len(x)) - len(x)
    padded = F.pad(values.view(torch.uint8), (0, 0, 0, more)).view(FP8)
    return Fp8Rows(padded, F.pad(scales.t(), (0, more)).contiguous().t(), group, len(x), x.dtype)


def prepare(matrix: Fp8Matrix, dtype: torch.dtype) -> Fp8Matrix:
    """Return the matrix for products with rows in the dtype.

    It is `scaled` if PyTorch multiplies rows in 8 bits by it, which is tried once.
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
    # cuBLAS refuses a scale for each row on some GPUs that have FP8: sm_100, sm_110, sm_120
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
    """Return scales for output blocks [groups, out / 128], as for cuBLAS, from [out, groups].

    Groups are padded to a multiple of 4, and a block's scales are contiguous. Returns `None` if
    the outputs within a block differ in scales.
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
    """Return `x @ matrix.T + bias`, [T, out] in x's dtype, for x [T, in], with rows unchanged."""
    return F.linear(x, dense(matrix).to(x.dtype), bias)


def scaled_linear(rows: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `rows @ matrix.T + bias`, both sides in 8 bits, for a `scaled` matrix.

    A CPU lacks products by blocks.
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
    """Return the matrix, or the matrices, in float32."""
    values, scales, group = matrix.values, matrix.scales, matrix.group
    return values.float() * scales.repeat_interleave(group, -1)[..., : values.shape[-1]]
