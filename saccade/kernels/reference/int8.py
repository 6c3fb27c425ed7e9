"""8-bit products on a CPU: matrices with a scale per output, rows quantised as they come, each by
its own largest value.

A product reads half the bytes of bfloat16. Sums are whole numbers, so that a row has the same bits
in any batch. Stateless.
"""

from __future__ import annotations

import torch

from saccade.kernels.matrix import Int8Matrix
from saccade.kernels.processor import has_vnni
from saccade.kernels.x86.vnni import runs_vnni
from saccade.kernels.x86.vnni_call import LARGEST, LEAST_SCALE
from saccade.kernels.x86.vnni_layout import bytes_linear, pack_bytes, pad_scales

ZERO = 128
"""What stands for 0 in a quantised row: oneDNN is fast for unsigned rows on every processor with
VNNI, for signed ones with AMX only.
"""
BLOCK_VALUES = 1 << 17
"""Values that are quantised at a time: what is made of them on the way stays in a core's cache."""


def runs_int8() -> bool:
    """Return True if this processor sums 8-bit products without overflow, and torch has the kernel.

    The processor needs VNNI or AMX.
    """
    return has_vnni() and torch.backends.mkldnn.is_available()


def quantise_matrix(weight: torch.Tensor) -> Int8Matrix:
    """Quantise `weight` [out, in] by each output's largest value, a few rows at a time."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    step = max(1, BLOCK_VALUES // max(1, weight.shape[1]))
    for rows, target, scale in zip(weight.split(step), values.split(step), scales.split(step)):
        torch.div(rows.float().abs().amax(1), LARGEST, out=scale)
        target.copy_((rows / scale.clamp_min(LEAST_SCALE).unsqueeze(1)).round_())
    return Int8Matrix(values, scales)


def pack_int8(matrix: Int8Matrix) -> Int8Matrix:
    """Return `matrix` in the form that `int8_linear` takes. Only `int8_linear` can read it."""
    if runs_vnni() and matrix.values.shape[1]:
        return Int8Matrix(pack_bytes(matrix.values), pad_scales(matrix.scales))
    return Int8Matrix(torch.ops.onednn.qlinear_prepack(matrix.values, None), matrix.scales)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to uint8 [T, in], where `ZERO` means 0, and float32 scales [T, 1]."""
    count = max(1, BLOCK_VALUES // max(1, x.shape[1]))
    if x.shape[0] <= count:
        return _quantise_block(x)
    values = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(x.shape[0], 1)
    for rows, target, scale in zip(x.split(count), values.split(count), scales.split(count)):
        made = _quantise_block(rows)
        target.copy_(made[0])
        scale.copy_(made[1])
    return values, scales


def _quantise_block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).div_(LARGEST).clamp_min_(LEAST_SCALE)
    # PyTorch casts to signed numbers four times as fast; their top bit, turned, adds `ZERO`.
    signed = (wide / scales).round_().to(torch.int8)
    return signed.view(torch.uint8).bitwise_xor_(ZERO), scales


def int8_linear(
    x: torch.Tensor,
    matrix: Int8Matrix,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `x @ matrix.T + bias`, [T, out], for x [T, in] and a matrix from `pack_int8`.

    dtype: the result's; `None`: x's.
    """
    if matrix.values.dtype == torch.int32:
        return bytes_linear(x, matrix.values, matrix.scales, bias, dtype)
    rows, scales = quantise_rows(x)
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
    x: torch.Tensor,
    matrix: Int8Matrix,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Do as `int8_linear` in plain PyTorch, with an unpacked matrix. For tests."""
    rows, scales = quantise_rows(x)
    sums = (rows.long() - ZERO) @ matrix.values.long().t()
    return _scale(sums.float() * matrix.scales, scales, bias, dtype or x.dtype)


def _scale(
    products: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if dtype != products.dtype and bias is None:
        return torch.mul(products, scales, out=torch.empty(products.shape, dtype=dtype))
    products.mul_(scales)
    return products if bias is None else products.add_(bias).to(dtype)
