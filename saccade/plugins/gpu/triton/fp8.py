"""`fp8.fp8_linear` as a Triton kernel: weights are loaded as 8 bits and converted to the dtype of
the rows in registers.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.kernels import device
from saccade.kernels.matrix import Fp8Matrix
from saccade.plugins.gpu.triton.tiling import Tiling, first_that_fills

FEW = (Tiling(16, 64, 1, 4, 4), Tiling(16, 32, 2, 4, 4), Tiling(16, 16, 4, 4, 4))
"""For at most 16 rows: the first with enough programs, or else the last. Loading the weights is the
bottleneck. A program with fewer outputs keeps as many bytes in flight by splitting the inputs.
"""
FEW_WIDE = (FEW[0], Tiling(16, 32, 2, 4, 3), Tiling(16, 16, 4, 4, 2))
"""The tilings for at most 16 rows of 32-bit values, which must fit into 99 KB of shared memory."""
MANY = Tiling(128, 64, 1, 4, 3)
MANY_SMALL = Tiling(64, 64, 1, 4, 3)
"""The tiling for many rows on GPUs with 99 KB of shared memory per multiprocessor."""
MANY_WIDE = Tiling(32, 64, 1, 4, 2)
"""The tiling for many rows of 32-bit values."""
INPUTS = 128
"""Maximum number of inputs multiplied per iteration."""


@triton.jit
def as_rows(weight, dtype: tl.constexpr):
    """Convert weights to the dtype of the rows, exactly. GPUs convert FP8 to float16 and float32 to
    bfloat16 in pairs, but float16 to bfloat16 one by one on their slowest unit, so bfloat16 goes
    through float32.
    """
    if weight.dtype == dtype or dtype != tl.bfloat16:
        return weight.to(dtype)
    return weight.to(tl.float32).to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    values,
    scales,
    bias,
    out,
    rows,
    x_stride,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    has_bias: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Program (block of outputs, block of rows).

    The weights are the left operand, which Hopper can read from registers, where they are
    converted.
    """
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    k = tl.arange(0, block_k)
    weight_at = values + n.to(tl.int64)[:, None] * inputs + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    acc = tl.zeros([block_n, block_m], tl.float32)
    for at in tl.range(0, inputs, block_k):
        here = at + k < inputs
        weight = tl.load(weight_at + at, mask=(n < outputs)[:, None] & here[None, :], other=0.0)
        row = tl.load(x_at + at, mask=(m < rows)[None, :] & here[:, None], other=0.0)
        if groups == 1:
            acc = tl.dot(as_rows(weight, row.dtype), row, acc, input_precision="ieee")
        else:
            scale = tl.load(scales + n * groups + at // group, mask=n < outputs, other=0.0)
            part = tl.dot(as_rows(weight, row.dtype), row, input_precision="ieee")
            acc += part * scale[:, None]
    if groups == 1:
        acc *= tl.load(scales + n, mask=n < outputs, other=0.0)[:, None]
    if has_bias:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    to = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    known = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["rows"])
def _few(
    x,
    values,
    scales,
    bias,
    out,
    rows,
    x_stride,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    has_bias: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    splits: tl.constexpr,
):
    """Program (block of outputs, block of rows). The blocks of inputs are assigned to the splits
    round-robin, and each split has its own warps.
    """
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    k = tl.arange(0, splits)[:, None] * block_k + tl.arange(0, block_k)[None, :]
    weight_at = values + n.to(tl.int64)[None, :, None] * inputs + k[:, None, :]
    x_at = x + m.to(tl.int64)[None, None, :] * x_stride + k[:, :, None]
    known_n, known_m = (n < outputs)[None, :], (m < rows)[None, None, :]
    acc = tl.zeros([splits, block_n, block_m], tl.float32)
    for at in tl.range(0, inputs, splits * block_k):
        here = at + k < inputs
        known = known_n[:, :, None] & here[:, None, :]
        weight = tl.load(weight_at + at, mask=known, other=0.0)
        row = tl.load(x_at + at, mask=known_m & here[:, :, None], other=0.0)
        if groups == 1:
            acc = tl.dot(as_rows(weight, row.dtype), row, acc, input_precision="ieee")
        else:
            first = at + tl.arange(0, splits) * block_k
            scale_at = n[None, :] * groups + (first // group)[:, None]
            inside = known_n & (first < inputs)[:, None]
            scale = tl.load(scales + scale_at, mask=inside, other=0.0)
            part = tl.dot(as_rows(weight, row.dtype), row, input_precision="ieee")
            acc += part * scale[:, :, None]
    y = tl.sum(acc, 0)
    if groups == 1:
        y *= tl.load(scales + n, mask=n < outputs, other=0.0)[:, None]
    if has_bias:
        y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    to = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(to, tl.trans(y).to(out.dtype.element_ty), mask=(m < rows)[:, None] & known_n)


def _cut(x: torch.Tensor, outputs: int) -> Tiling:
    if len(x) <= FEW[0].rows:
        cuts = FEW if x.element_size() == 2 else FEW_WIDE
        return first_that_fills(cuts, len(x), outputs)
    if x.element_size() > 2:
        return MANY_WIDE
    return MANY if device.has_room(x.device) else MANY_SMALL


def launch_fp8(
    x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `fp8.fp8_linear` in one launch."""
    assert x.stride(1) == 1 and matrix.values.is_contiguous() and matrix.scales.is_contiguous()
    rows, inputs = x.shape
    outputs, groups = matrix.scales.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    cut = _cut(x, outputs)
    shape = {
        "outputs": outputs,
        "inputs": inputs,
        "group": matrix.group,
        "groups": groups,
        "has_bias": bias is not None,
        "block_m": cut.rows,
        "block_n": cut.outputs,
        "block_k": INPUTS if groups == 1 else min(INPUTS, matrix.group & -matrix.group),
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }
    grid = (triton.cdiv(outputs, cut.outputs), triton.cdiv(rows, cut.rows))
    given = (x, matrix.values, matrix.scales, bias, out, rows, x.stride(0))
    if cut.splits > 1:
        _few[grid](*given, **shape, splits=cut.splits)
    else:
        _product[grid](*given, **shape)
    return out
