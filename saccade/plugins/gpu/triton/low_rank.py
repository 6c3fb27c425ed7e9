"""`low_rank.add_low_rank` as two Triton kernels for all adapters in a batch.

A program computes up to 16 rows of one adapter. The order of its sums does not depend on the rest
of the batch, so results are batch-invariant.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.kernels.reference.low_rank import ALIGNED, GROUP_ROWS, Additions, Present

ROWS = tl.constexpr(GROUP_ROWS)
RANKS = tl.constexpr(32)
"""Ranks computed by a program of `_shrink`, and per iteration of `_expand`."""
SPLIT = tl.constexpr(1024)
"""Number of inputs that a program sums. Without this split, small batches have too few programs."""
OUTPUTS = tl.constexpr(128)
EVEN = tl.constexpr(ALIGNED)
WARPS = 4


@triton.jit
def _group(groups, rows):
    """(adapter index, offset in `rows`, the rows' batch indices [16], a mask of valid ones)."""
    at = groups + tl.program_id(0) * 3
    place = tl.load(at)
    first = tl.load(at + 1)
    m = tl.arange(0, ROWS)
    known = m < tl.load(at + 2)
    return place, first, tl.load(rows + first + m, mask=known, other=0), known


@triton.jit(do_not_specialize=["places", "count"])
def _shrink(
    x,
    downs,
    table,
    rows,
    groups,
    inner,
    places,
    count,
    inputs,
    x_stride,
    inner_stride,
    fields: tl.constexpr,
    step: tl.constexpr,
):
    """Program (group, block of ranks, split of inputs): inner[split, row, rank], in float32.

    places: the number of adapters in the table; adapters beyond it add 0. count: the number of rows
    in all groups.
    """
    place, first, row, known = _group(groups, rows)
    line = table + place.to(tl.int64) * fields
    begin = tl.load(line, mask=place < places, other=0)
    ranks = tl.load(line + 1, mask=place < places, other=0)
    r = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    split = tl.program_id(2)
    if tl.program_id(1) * RANKS < ranks:
        x_at = x + row[:, None] * x_stride
        down_at = downs + (begin + r)[None, :] * inputs
        acc = tl.zeros([ROWS, RANKS], tl.float32)
        for start in tl.range(split * SPLIT, tl.minimum(inputs, (split + 1) * SPLIT), step):
            k = start + tl.arange(0, step)
            mine = tl.load(
                x_at + k[None, :], mask=known[:, None] & (k < inputs)[None, :], other=0.0
            )
            inside = (r < ranks)[None, :] & (k < inputs)[:, None]
            weight = tl.load(down_at + k[:, None], mask=inside, other=0.0)
            acc = tl.dot(mine, weight, acc, input_precision="ieee")
        m = first + tl.arange(0, ROWS)
        to = inner + (split * count + m).to(tl.int64)[:, None] * inner_stride + r[None, :]
        tl.store(to, acc, mask=known[:, None])


@triton.jit(do_not_specialize=["places", "count", "splits"])
def _expand(
    y,
    ups,
    table,
    parts,
    rows,
    groups,
    inner,
    places,
    count,
    splits,
    y_stride,
    inner_stride,
    fields: tl.constexpr,
    even: tl.constexpr,
):
    """Program (group, part, block of its outputs): add to y, summing the splits in order.

    even: all parts start and end at multiples of `EVEN`.
    """
    form: tl.constexpr = y.dtype.element_ty
    place, first, row, known = _group(groups, rows)
    part = tl.program_id(1)
    line = table + place.to(tl.int64) * fields + 2 + 4 * part
    start = tl.load(line, mask=place < places, other=0)
    ranks = tl.load(line + 1, mask=place < places, other=0)
    begin = tl.multiple_of(tl.load(line + 2, mask=place < places, other=0), EVEN)
    width = tl.multiple_of(tl.load(line + 3, mask=place < places, other=0), EVEN)
    output = tl.load(parts + 2 * part)
    outputs = tl.load(parts + 2 * part + 1)
    if even:
        output = tl.multiple_of(output, EVEN)
        outputs = tl.multiple_of(outputs, EVEN)
    o = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    if (ranks > 0) & (tl.program_id(2) * OUTPUTS < outputs):
        m = first + tl.arange(0, ROWS)
        acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for at in tl.range(0, ranks, RANKS):
            r = at + tl.arange(0, RANKS)
            there = known[:, None] & (r < ranks)[None, :]
            total = tl.zeros([ROWS, RANKS], tl.float32)
            for split in tl.range(0, splits):
                from_ = inner + (split * count + m).to(tl.int64)[:, None] * inner_stride
                total += tl.load(from_ + (start + r)[None, :], mask=there, other=0.0)
            inside = (r < ranks)[:, None] & (o < width)[None, :]
            weight = tl.load(ups + begin + r[:, None] * width + o[None, :], mask=inside, other=0.0)
            acc = tl.dot(total.to(form), weight, acc, input_precision="ieee")
        to = y + row[:, None] * y_stride + output + o[None, :]
        here = known[:, None] & (o < outputs)[None, :]
        before = tl.load(to, mask=here, other=0.0).to(tl.float32)
        tl.store(to, (before + acc).to(form), mask=here)


def launch_low_rank(
    x: torch.Tensor, y: torch.Tensor, additions: Additions, present: Present
) -> None:
    """Compute `low_rank.add_low_rank` in two launches, for any number of adapters."""
    if not any(place in additions.pairs for place, _ in present.each):
        return
    assert x.stride(1) == 1 and y.stride(1) == 1 and x.dtype == y.dtype
    rows, groups = present.groups(len(x), x.device)
    if not len(groups):
        return
    packed = additions.packed()
    places, fields = packed.table.shape
    inputs = x.shape[1]
    splits = triton.cdiv(inputs, SPLIT.value)
    blocks = triton.cdiv(packed.ranks, RANKS.value)
    kept = (splits, len(rows), blocks * RANKS.value)
    inner = torch.empty(kept, dtype=torch.float32, device=x.device)
    step = 128 if x.element_size() == 2 else 64
    same = {"fields": fields, "num_warps": WARPS}
    _shrink[(len(groups), blocks, splits)](
        *(x, packed.downs, packed.table, rows, groups, inner, places, len(rows)),
        *(inputs, x.stride(0), kept[2]),
        **same,
        step=step,
    )
    tiles = triton.cdiv(additions.widest, OUTPUTS.value)
    _expand[(len(groups), len(additions.parts), tiles)](
        *(y, packed.ups, packed.table, packed.parts, rows, groups, inner, places, len(rows)),
        *(splits, y.stride(0), kept[2]),
        **same,
        even=additions.even,
    )
