"""`int4.int4_linear` as Triton kernels: weights are loaded as 4 bits and converted to the dtype of
the rows in registers.

Two adjacent weights are stored 16 bits apart (`Int4Matrix`), so one shift and one mask turn both
into the low bits of 16-bit floats whose high bits encode a power of two. Subtracting that power and
the zero point gives the exact values.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from saccade.kernels.matrix import CHUNK, Int4Matrix
from saccade.plugins.gpu.triton.tiling import Tiling, first_that_fills

FEW = (Tiling(16, 64, 4, 8, 3), Tiling(16, 32, 4, 4, 4), Tiling(16, 16, 4, 4, 4))
SOME = (Tiling(64, 128, 1, 8, 3), Tiling(32, 32, 2, 4, 3))
MANY = (Tiling(128, 128, 1, 8, 3), Tiling(64, 64, 1, 4, 3))
"""For at most 16 rows, at most 64, and more: the first with enough programs, or else the last. With
few rows, loading the weights is the bottleneck, so tiles are small and the inputs are split among
warps. But each program loads all rows, so tiles are no smaller than necessary.
"""
SOME_WIDE = SOME[1:]
MANY_WIDE = (Tiling(32, 64, 1, 4, 2),)
"""The tilings for many rows of 32-bit values."""
WORDS = tl.constexpr(16)
"""Words per chunk."""
QUARTER = tl.constexpr(32)
"""Weights per row of a chunk that one shift and mask unpacks."""
QUARTERS = tl.constexpr(4)
LENGTH = tl.constexpr(128)
"""Inputs per chunk."""
IN_BFLOAT16 = tl.constexpr(0x4300)
IN_FLOAT16 = tl.constexpr(0x6400)
"""The bits of 128 and of 1024. Adding an integer below 16 to these only changes the low bits."""


@triton.jit
def _numbers(words, quarter: tl.constexpr, form: tl.constexpr):
    """Unpack words [..., 16] to pairs of weights [..., 16, 2] of a quarter. They exceed the real
    values by the result of `_above`.
    """
    if form == tl.float32:
        low = ((words >> (4 * quarter)) & 15).to(tl.float32)
        high = ((words >> (4 * quarter + 16)) & 15).to(tl.float32)
    else:
        base: tl.constexpr = IN_BFLOAT16 if form == tl.bfloat16 else IN_FLOAT16
        both = ((words >> (4 * quarter)) & 0x000F000F) | (base | base << 16)
        low = (both & 0xFFFF).to(tl.uint16).to(form, bitcast=True)
        high = (both >> 16).to(tl.uint16).to(form, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _above(zeros, at, known, has_zeros: tl.constexpr, form: tl.constexpr):
    """What to subtract from the results of `_numbers`: the zero point and the power of two."""
    more: tl.constexpr = 0 if form == tl.float32 else (128 if form == tl.bfloat16 else 1024)
    if has_zeros:
        zero = tl.load(zeros + at, mask=known, other=8).to(tl.float32)
    else:
        zero = tl.where(known, 8.0, 8.0)
    return (zero + more).to(form)


@triton.jit
def _inputs(x, order, column, rows, inputs: tl.constexpr, has_order: tl.constexpr):
    """Load the rows' values at the matrix's columns [S, K] as [S, K, M]. They are 0 beyond the
    inputs and for missing rows.
    """
    inside = column < inputs
    if has_order:
        column = tl.load(order + column, mask=inside, other=0)
    return tl.load(x + column[:, :, None], mask=inside[:, :, None] & rows, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _few(
    x,
    words,
    scales,
    zeros,
    order,
    bias,
    out,
    rows,
    x_stride,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    group: tl.constexpr,
    quarters: tl.constexpr,
    has_zeros: tl.constexpr,
    has_order: tl.constexpr,
    has_bias: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    splits: tl.constexpr,
):
    """Program (block of outputs, block of rows). Chunks are assigned to the splits round-robin, and
    each split has its own warps. quarters: the number of a chunk's quarters that share a scale.
    """
    form: tl.constexpr = x.dtype.element_ty
    chunks: tl.constexpr = (inputs + LENGTH - 1) // LENGTH
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    part = tl.arange(0, splits)
    k = tl.arange(0, QUARTER)
    word_at = n[None, :, None] * (chunks * WORDS) + tl.arange(0, WORDS)[None, None, :]
    x_at = x + m.to(tl.int64)[None, None, :] * x_stride
    acc = tl.zeros([splits, block_n, block_m], tl.float32)
    for turn in tl.range(0, (chunks + splits - 1) // splits):
        chunk = turn * splits + part
        here = (chunk < chunks)[:, None] & (n < outputs)[None, :]
        word = tl.load(
            words + word_at + chunk[:, None, None] * WORDS, mask=here[:, :, None], other=0
        )
        some = tl.zeros([splits, block_n, block_m], tl.float32)
        for quarter in tl.static_range(QUARTERS):
            if quarter % quarters == 0:
                at = (chunk * LENGTH + quarter * QUARTER) // group
                scale_at = at[:, None] * outputs + n[None, :]
                scale = tl.load(scales + scale_at, mask=here, other=0.0).to(tl.float32)
                above = _above(zeros, scale_at, here, has_zeros, form)
            wide = tl.reshape(_numbers(word, quarter, form), [splits, block_n, QUARTER])
            column = (chunk * LENGTH + quarter * QUARTER)[:, None] + k[None, :]
            row = _inputs(x_at, order, column, (m < rows)[None, None, :], inputs, has_order)
            some = tl.dot(wide - above[:, :, None], row, some, input_precision="ieee")
            if (quarter + 1) % quarters == 0:
                acc += some * scale[:, :, None]
                some = tl.zeros([splits, block_n, block_m], tl.float32)
    y = tl.sum(acc, 0)
    if has_bias:
        y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    to = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    known = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(to, tl.trans(y).to(form), mask=known)


@triton.jit(do_not_specialize=["rows"])
def _many(
    x,
    words,
    scales,
    zeros,
    bias,
    out,
    rows,
    x_stride,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    group: tl.constexpr,
    quarters: tl.constexpr,
    has_zeros: tl.constexpr,
    has_bias: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Program (block of outputs, block of rows). Weights are scaled in registers before they are
    multiplied, as Hopper can read the left operand from registers.
    """
    form: tl.constexpr = x.dtype.element_ty
    chunks: tl.constexpr = (inputs + LENGTH - 1) // LENGTH
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    k = tl.arange(0, QUARTER)
    word_at = words + n[:, None] * (chunks * WORDS) + tl.arange(0, WORDS)[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros([block_n, block_m], tl.float32)
    for chunk in tl.range(0, chunks):
        word = tl.load(word_at + chunk * WORDS, mask=(n < outputs)[:, None], other=0)
        for quarter in tl.static_range(QUARTERS):
            first = chunk * LENGTH + quarter * QUARTER
            if quarter % quarters == 0:
                scale_at = first // group * outputs + n
                scale = tl.load(scales + scale_at, mask=n < outputs, other=0.0).to(tl.float32)
                above = _above(zeros, scale_at, n < outputs, has_zeros, form)
            wide = tl.reshape(_numbers(word, quarter, form), [block_n, QUARTER])
            wide = ((wide - above[:, None]).to(tl.float32) * scale[:, None]).to(form)
            inside = (m < rows)[None, :] & (first + k < inputs)[:, None]
            row = tl.load(x_at + (first + k)[:, None], mask=inside, other=0.0)
            acc = tl.dot(wide, row, acc, input_precision="ieee")
    if has_bias:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    to = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    known = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(to, tl.trans(acc).to(form), mask=known)


def launch_int4(
    x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `int4.int4_linear` in one launch, or in two for a large batch if the matrix's inputs
    are permuted.
    """
    words, scales, zeros = matrix.words, matrix.scales, matrix.zeros
    group, inputs, order = matrix.group, matrix.inputs, matrix.order
    assert x.stride(1) == 1 and words.is_contiguous() and scales.is_contiguous()
    assert x.shape[1] == inputs
    rows, outputs = x.shape[0], words.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    cut = _cut(rows, outputs, x.element_size())
    grid = (triton.cdiv(outputs, cut.outputs), triton.cdiv(rows, cut.rows))
    shape = {
        "outputs": outputs,
        "inputs": inputs,
        "group": group,
        "quarters": min(group & -group, CHUNK) // QUARTER.value,
        "has_zeros": zeros is not None,
        "has_bias": bias is not None,
        "block_m": cut.rows,
        "block_n": cut.outputs,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }
    if cut.splits > 1:
        shape |= {"has_order": order is not None, "splits": cut.splits}
        _few[grid](x, words, scales, zeros, order, bias, out, rows, x.stride(0), **shape)
        return out
    if order is not None:
        x = x.index_select(1, order)
    _many[grid](x, words, scales, zeros, bias, out, rows, x.stride(0), **shape)
    return out


def _cut(rows: int, outputs: int, item: int) -> Tiling:
    if rows <= FEW[0].rows:
        cuts: Sequence[Tiling] = FEW
    elif rows <= SOME[0].rows:
        cuts = SOME if item == 2 else SOME_WIDE
    else:
        cuts = MANY if item == 2 else MANY_WIDE
    return first_that_fills(cuts, rows, outputs)
