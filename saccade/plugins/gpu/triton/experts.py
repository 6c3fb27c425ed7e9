"""`moe.route` as a Triton kernel, and `experts.stacked_mlp` as four, for any distribution of rows.

Pairs (row, expert) are sorted by expert, and a program multiplies one tile of an expert's pairs.
There are as many programs as tiles in the worst case; surplus programs return at once. So the
experts of rows stay on the device, the grid depends only on sizes and can be captured in a CUDA
graph, and the weights of an expert without rows are not read.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.kernels.matrix import Fp8Experts, Stack
from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.moe import Routes
from saccade.plugins.gpu.triton.activation import GATES, activated
from saccade.plugins.gpu.triton.attention import Tile
from saccade.plugins.gpu.triton.fp8 import as_rows

FEW = Tile(rows=16, keys=32, warps=4, stages=4)
"""Tiles: `rows` are pairs, and `keys` outputs. With few pairs, weight loads are the bottleneck."""
SOME = Tile(rows=64, keys=64, warps=4, stages=3)
MANY = Tile(rows=128, keys=128, warps=8, stages=3)
MANY_WIDE = Tile(rows=32, keys=64, warps=4, stages=2)
"""The tile for many pairs of 32-bit values."""
INPUTS = 128
"""Maximum number of inputs multiplied per iteration."""
INPUTS_OF_MANY = 64
COMPARED = 4096
"""Up to this many pairs, each pair is compared with all others. More are sorted by PyTorch, which
takes more launches.
"""
WARP_VALUES = 256
MAX_WARPS = 8
"""Values of a row that each warp sums, and the maximum warps per row."""
ROUTE_LANES = 128
"""Experts per warp. Each of a row's chosen experts takes a pass over them."""
BLOCK = tl.constexpr(64)
OTHERS = tl.constexpr(128)
"""Pairs that a program sorts, and those that it compares them with per iteration."""


@triton.jit
def _route(
    logits,
    experts,
    shares,
    stride,
    count: tl.constexpr,
    lanes: tl.constexpr,
    top: tl.constexpr,
    kept: tl.constexpr,
):
    """Program (row): the `top` best of `count` experts and their weights; of equal experts, the
    first. For NaN logits, the weights are NaN and the experts are valid indices.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, lanes)
    logit = tl.load(logits + row * stride + e, mask=e < count, other=float("-inf")).to(tl.float32)
    weight = tl.exp(logit - tl.max(logit, 0))
    poison = tl.sum(weight, 0) * 0.0
    left = tl.where(e < count, weight, -1.0)
    k = tl.arange(0, kept)
    chosen = tl.zeros([kept], tl.int32)
    share = tl.zeros([kept], tl.float32) + poison
    for at in tl.static_range(top):
        best = tl.minimum(tl.argmax(left, 0), count - 1)
        chosen = tl.where(k == at, best, chosen)
        share = tl.where(k == at, tl.max(left, 0) + poison, share)
        left = tl.where(e == best, -1.0, left)
    share /= tl.sum(share, 0)
    tl.store(experts + row * top + k, chosen.to(tl.int64), mask=k < top)
    tl.store(shares + row * top + k, share.to(shares.dtype.element_ty), mask=k < top)


@triton.jit(do_not_specialize=["pairs", "before"])
def _place(experts, order, starts, pairs, before, count: tl.constexpr):
    """Program (block of pairs, then of experts): a counting sort.

    order [pairs]: the pairs by expert, otherwise in their original order. starts [count + 1]: where
    each expert's pairs start in `order`. `before`: the index of the first expert.
    """
    blocks = tl.cdiv(pairs, BLOCK)
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    placing = mine < blocks * BLOCK
    number = mine - blocks * BLOCK  # the expert's index, for programs after those of pairs
    wanted = tl.load(experts + mine, mask=mine < pairs, other=0).to(tl.int32)
    wanted = tl.where(placing, wanted, number + before)
    place = tl.zeros([BLOCK], tl.int32)
    for at in tl.range(0, pairs, OTHERS):
        other = at + tl.arange(0, OTHERS)
        known = other < pairs
        theirs = tl.load(experts + other, mask=known, other=0).to(tl.int32)
        same = theirs[None, :] == wanted[:, None]
        tied = same & placing[:, None] & (other[None, :] < mine[:, None])
        earlier = ((theirs[None, :] < wanted[:, None]) | tied) & known[None, :]
        place += tl.sum(earlier.to(tl.int32), 1)
    tl.store(order + place, mine, mask=placing & (mine < pairs))
    tl.store(starts + number, place, mask=(number >= 0) & (number <= count))


@triton.jit
def _tile(starts, tile, block_m: tl.constexpr, count: tl.constexpr, lanes: tl.constexpr):
    """(expert, first pair, end of the expert's pairs) of a tile. If there is no such tile, the end
    is not after the first pair.
    """
    e = tl.arange(0, lanes)
    first = tl.load(starts + e, mask=e < count, other=0)
    end = tl.load(starts + e + 1, mask=e < count, other=0)
    tiles = (end - first + block_m - 1) // block_m
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    its = e == expert
    begin = tl.sum(tl.where(its, first + (tile - ends + tiles) * block_m, 0), 0)
    return expert, begin, tl.sum(tl.where(its, end, 0), 0)


@triton.jit
def _multiply(
    values,
    scales,
    at,
    known,
    x_at,
    here,
    inputs: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Multiply rows at `x_at` by outputs whose weights start at row `at` of `values`. Returns
    [block_n, block_m].

    The weights are the left operand, which Hopper can read from registers, where they are
    converted.
    """
    k = tl.arange(0, block_k)
    weight_at = values + at[:, None] * inputs + k[None, :]
    row_at = x_at[None, :] + k[:, None]
    acc = tl.zeros([block_n, block_m], tl.float32)
    for done in tl.range(0, inputs, block_k):
        inside = done + k < inputs
        weight = tl.load(weight_at + done, mask=known[:, None] & inside[None, :], other=0.0)
        row = tl.load(row_at + done, mask=here[None, :] & inside[:, None], other=0.0)
        if groups <= 1:
            acc = tl.dot(as_rows(weight, row.dtype), row, acc, input_precision="ieee")
        else:
            scale = tl.load(scales + at * groups + done // group, mask=known, other=0.0)
            part = tl.dot(as_rows(weight, row.dtype), row, input_precision="ieee")
            acc += part * scale[:, None]
    if groups == 1:
        acc *= tl.load(scales + at, mask=known, other=0.0)[:, None]
    return acc


@triton.jit
def _up(
    x,
    values,
    scales,
    order,
    starts,
    out,
    x_stride,
    top: tl.constexpr,
    count: tl.constexpr,
    lanes: tl.constexpr,
    width: tl.constexpr,
    inputs: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    tanh: tl.constexpr,
):
    """Program (block of inner values, tile): out [pairs, width] = act(gate) * up, as in `order`."""
    expert, first, end = _tile(starts, tl.program_id(1), block_m, count, lanes)
    if first >= end:
        return
    place = first + tl.arange(0, block_m)
    here = place < end
    row = tl.load(order + place, mask=here, other=0) // top
    x_at = x + row.to(tl.int64) * x_stride
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    known = n < width
    at = expert.to(tl.int64) * (2 * width) + n
    gate = _multiply(
        values, scales, at, known, x_at, here, inputs, group, groups, block_m, block_n, block_k
    )
    other = _multiply(
        values, scales, at + width, known, x_at, here, inputs, group, groups, block_m, block_n,
        block_k,
    )  # fmt: skip
    kind = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)  # rounded as the reference does
    gated = activated(gate, tanh).to(kind).to(tl.float32) * other.to(kind).to(tl.float32)
    to = out + place.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(to, tl.trans(gated).to(kind), mask=here[:, None] & known[None, :])


@triton.jit
def _down(
    x,
    values,
    scales,
    shares,
    order,
    starts,
    out,
    count: tl.constexpr,
    lanes: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Program (block of outputs, tile): out [pairs, outputs], in the pairs' original order, times
    their weights.
    """
    expert, first, end = _tile(starts, tl.program_id(1), block_m, count, lanes)
    if first >= end:
        return
    place = first + tl.arange(0, block_m)
    here = place < end
    pair = tl.load(order + place, mask=here, other=0)
    x_at = x + place.to(tl.int64) * inputs
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    known = n < outputs
    at = expert.to(tl.int64) * outputs + n
    y = _multiply(
        values, scales, at, known, x_at, here, inputs, group, groups, block_m, block_n, block_k
    )
    kind = out.dtype.element_ty
    share = tl.load(shares + pair, mask=here, other=0.0).to(tl.float32)
    y = y.to(kind).to(tl.float32) * share[None, :]
    to = out + pair.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(to, tl.trans(y).to(kind), mask=here[:, None] & known[None, :])


@triton.jit(do_not_specialize=["before"])
def _sum(
    each,
    experts,
    out,
    before,
    top: tl.constexpr,
    count: tl.constexpr,
    size: tl.constexpr,
    columns: tl.constexpr,
):
    """Program (row): out = the sum over those of the row's experts that this rank has."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, columns)
    total = tl.zeros([columns], tl.float32)
    for k in tl.static_range(top):
        # A vector, because Triton's interpreter does not accept scalars as masks.
        number = tl.load(experts + row * top + k).to(tl.int32) - before + 0 * c
        here = (number >= 0) & (number < count) & (c < size)
        total += tl.load(each + (row * top + k) * size + c, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * size + c, total.to(out.dtype.element_ty), mask=c < size)


def launch_route(logits: torch.Tensor, top: int) -> Routes:
    """Compute `moe.route`."""
    rows, count = logits.shape
    assert logits.stride(1) == 1 and 0 < top <= count
    experts = torch.empty((rows, top), dtype=torch.int64, device=logits.device)
    shares = torch.empty((rows, top), dtype=logits.dtype, device=logits.device)
    if rows:
        lanes = triton.next_power_of_2(count)
        _route[(rows,)](
            logits, experts, shares, logits.stride(0),
            count=count, lanes=lanes, top=top, kept=triton.next_power_of_2(top),
            num_warps=max(1, min(4, lanes // ROUTE_LANES)),
        )  # fmt: skip
    return Routes(experts, shares)


def by_expert(experts: torch.Tensor, before: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the (row, expert) pairs in `experts` [T, K] by expert, and find where each expert's
    pairs start.

    before: the index of the first expert.
    count: the number of experts.

    Returns the pairs, int32 [T K], and the starts, int32 [count + 1]. The host reads no values.
    """
    pairs = experts.numel()
    flat = experts.reshape(pairs)
    if pairs > COMPARED:
        owners, order = flat.sort(stable=True)
        numbers = torch.arange(before, before + count + 1, device=flat.device)
        return order.int(), torch.searchsorted(owners, numbers).int()
    order = torch.empty(pairs, dtype=torch.int32, device=flat.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=flat.device)
    blocks = triton.cdiv(pairs, BLOCK.value) + triton.cdiv(count + 1, BLOCK.value)
    _place[(blocks,)](flat, order, starts, pairs, before, count=count, num_warps=4)
    return order, starts


class _Pieces(NamedTuple):
    """The weights of experts, as in Fp8Experts. They are not quantized if `scales` is None."""

    values: torch.Tensor
    scales: torch.Tensor | None
    group: int


def _pieces(experts: Stack) -> _Pieces:
    if isinstance(experts, Fp8Experts):
        return _Pieces(*experts)
    return _Pieces(experts, None, experts.shape[2])


def launch_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    up: Stack,
    down: Stack,
    before: int = 0,
    act: Activation = "silu",
) -> torch.Tensor:
    """Compute `experts.stacked_mlp`.

    act: one of `GATES`.
    """
    assert act in GATES
    rows, top = experts.shape
    wide, narrow = _pieces(up), _pieces(down)
    count, hidden, width = narrow.values.shape
    assert x.stride(1) == 1 and wide.values.shape == (count, 2 * width, hidden)
    assert wide.values.is_contiguous() and narrow.values.is_contiguous()
    if not rows:
        return torch.empty_like(x)
    pairs = rows * top
    order, starts = by_expert(experts, before, count)
    gated = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    each = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    tile = _tile_of(pairs / count, x.element_size(), wide.scales is not None)
    tiles = pairs // tile.rows + min(count, pairs)
    known = {"count": count, "lanes": triton.next_power_of_2(count)}
    known |= {"num_warps": tile.warps, "num_stages": tile.stages}
    _up[triton.cdiv(width, tile.keys), tiles](
        x, wide.values, wide.scales, order, starts, gated, x.stride(0),
        top=top, width=width, tanh=act == "gelu_tanh", **_cut(wide, tile), **known,
    )  # fmt: skip
    _down[triton.cdiv(hidden, tile.keys), tiles](
        gated, narrow.values, narrow.scales, shares.contiguous(), order, starts, each,
        outputs=hidden, **_cut(narrow, tile), **known,
    )  # fmt: skip
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(hidden)
    _sum[(rows,)](
        each, experts.contiguous(), out, before,
        top=top, count=count, size=hidden, columns=columns,
        num_warps=max(1, min(MAX_WARPS, columns // WARP_VALUES)),
    )  # fmt: skip
    return out


def _tile_of(pairs_each: float, item: int, eight: bool) -> Tile:
    """Return the tile for this average number of pairs per expert.

    eight: whether weights have 8 bits. Their scales take registers.
    """
    if pairs_each <= FEW.rows / 2:
        return FEW
    if item == 4:
        return MANY_WIDE
    return SOME if pairs_each <= SOME.rows or eight else MANY


def _cut(experts: _Pieces, tile: Tile) -> dict[str, int]:
    values, scales, group = experts
    inputs = values.shape[2]
    groups = 0 if scales is None else scales.shape[2]
    most = INPUTS if tile is FEW else INPUTS_OF_MANY
    return {
        "inputs": inputs,
        "group": group,
        "groups": groups,
        "block_m": tile.rows,
        "block_n": tile.keys,
        "block_k": most if groups <= 1 else min(most, group & -group),
    }
