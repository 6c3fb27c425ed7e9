"""`fp8.fp8_linear` as a Triton kernel: weights cross memory in 8 bits and become the rows' number
format where they are loaded. Knows tensors only.

Imported only where it runs: on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.kernels import device
from saccade.kernels.attention_gpu import Tile
from saccade.kernels.fp8 import Fp8Matrix

FEW_ROWS = 16
FEW = Tile(rows=16, keys=64, warps=4, stages=4)
"""Tiles: rows of x, and outputs (`keys`) of a program. What few rows cost is the weights' way."""
MANY = Tile(rows=128, keys=64, warps=4, stages=3)
MANY_SMALL = Tile(rows=64, keys=64, warps=4, stages=3)
"""For multiprocessors of 99 KB."""
MANY_WIDE = Tile(rows=32, keys=64, warps=4, stages=2)
"""For 32-bit values."""
INPUTS = 128
"""Inputs that are multiplied at a time, at most."""


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

    The weights stand on the left: Hopper takes that side from registers, where they are converted.
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
            acc = tl.dot(weight.to(row.dtype), row, acc, input_precision="ieee")
        else:
            scale = tl.load(scales + n * groups + at // group, mask=n < outputs, other=0.0)
            part = tl.dot(weight.to(row.dtype), row, input_precision="ieee")
            acc += part * scale[:, None]
    if groups == 1:
        acc *= tl.load(scales + n, mask=n < outputs, other=0.0)[:, None]
    if has_bias:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    to = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    known = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=known)


def _tile(x: torch.Tensor) -> Tile:
    if len(x) <= FEW_ROWS:
        return FEW
    if x.element_size() > 2:
        return MANY_WIDE
    return MANY if device.has_room(x.device) else MANY_SMALL


def launch_fp8(x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """`fp8.fp8_linear` in one launch."""
    assert x.stride(1) == 1 and matrix.values.is_contiguous() and matrix.scales.is_contiguous()
    rows, inputs = x.shape
    outputs, groups = matrix.scales.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = _tile(x)
    each = INPUTS if groups == 1 else min(INPUTS, matrix.group & -matrix.group)
    grid = (triton.cdiv(outputs, tile.keys), triton.cdiv(rows, tile.rows))
    _product[grid](
        x,
        matrix.values,
        matrix.scales,
        bias,
        out,
        rows,
        x.stride(0),
        outputs=outputs,
        inputs=inputs,
        group=matrix.group,
        groups=groups,
        has_bias=bias is not None,
        block_m=tile.rows,
        block_n=tile.keys,
        block_k=each,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
