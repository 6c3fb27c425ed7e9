"""The vision encoder's attention within segments (`attention.attend_segments`) as a Triton kernel.

Takes two launches: one lists the blocks of all segments, the other computes them, one program per
block. So an empty segment of a CUDA graph costs one program, instead of one for each block of the
longest segment. Heads of 72 values are padded to 80.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from saccade.kernels import device
from saccade.plugins.gpu.triton.attention import (
    LOG2_E,
    HeadTiling,
    Tile,
    attend_block,
    begin,
    beyond,
    finish,
)

TILE = Tile(rows=128, keys=64, warps=8, stages=3)
TILE_CUT = replace(TILE, registers=128)
"""For heads that are split in two (72, 80), on Hopper: two programs fit on a multiprocessor, so
that one multiplies while the other computes exponentials. An H200 reaches 358 TFLOP/s, 280 without
the register limit, and 340 with 4 warps (`gpu_check`, 14,400 rows).
"""
TILE_WIDE = Tile(rows=64, keys=32, warps=4, stages=2)
"""For 32-bit values, whose blocks take twice the memory."""
TILE_SHORT = Tile(rows=64, keys=64, warps=4, stages=3)
"""For segments of at most 64 rows (windows)."""


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=["bounds"])
def _list(bounds, items, firsts, count, segments, block_m: tl.constexpr, block: tl.constexpr):
    """Program (block of segments): list their blocks of `block_m` rows, each with its segment in
    `items` and its first row within the segment in `firsts`, without gaps. The first program writes
    the number of blocks to `count`.
    """
    s = tl.program_id(0) * block + tl.arange(0, block)
    rows = _rows_of(bounds, s, segments)
    before = tl.zeros([block], tl.int32)
    total = 0
    for at in range(0, segments, block):
        o = at + tl.arange(0, block)
        others = tl.cdiv(_rows_of(bounds, o, segments), block_m)
        before += tl.sum(tl.where(o[None, :] < s[:, None], others[None, :], 0), 1)
        total += tl.sum(others, 0)
    for first in range(0, tl.max(rows, 0), block_m):
        here = first < rows
        tl.store(items + before + first // block_m, s, mask=here)
        tl.store(firsts + before + first // block_m, tl.zeros([block], tl.int32) + first, mask=here)
    if tl.program_id(0) == 0:
        tl.store(count, total)


@triton.jit
def _rows_of(bounds, s, segments):
    """The number of rows of segments `s`, or 0 for segments that do not exist."""
    start = tl.load(bounds + s, mask=s < segments, other=0)
    return tl.load(bounds + s + 1, mask=s < segments, other=0) - start


@triton.jit
def _attend(
    q,
    k,
    v,
    out,
    q_bounds,
    k_bounds,
    items,
    firsts,
    count,
    scale_log2,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    heads: tl.constexpr,
    dim: tl.constexpr,
    d0: tl.constexpr,
    d1: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Program (block of rows of a head). Programs beyond the number of blocks return at once."""
    blocks, work = tl.load(count), tl.program_id(0)
    if work >= blocks * heads:
        return
    head = work // blocks
    segment = tl.load(items + work % blocks)
    first = tl.load(firsts + work % blocks)
    start = tl.load(q_bounds + segment)
    rows = tl.load(q_bounds + segment + 1) - start
    k_start = tl.load(k_bounds + segment)
    keys = tl.load(k_bounds + segment + 1) - k_start

    m = first + tl.arange(0, block_m)
    mine = m < rows
    at = (start + m).to(tl.int64)
    q_at = q + at * q_stride + head * dim
    q0, q1, acc0, acc1, top, total = begin(q_at, mine, dim, d0, d1)
    whole = keys // block_n * block_n
    for n in tl.range(0, whole, block_n):
        row = (k_start + n + tl.arange(0, block_n)).to(tl.int64)
        k_at = k + row * k_stride + head * dim
        v_at = v + row * v_stride + head * dim
        acc0, acc1, top, total = attend_block(
            q0, q1, k_at, v_at, None, None, acc0, acc1, top, total, scale_log2, dim, d0, d1
        )
    for n in tl.range(whole, keys, block_n):  # at most one iteration
        cols, bias = beyond(n + tl.arange(0, block_n), keys)
        row = (k_start + cols).to(tl.int64)
        k_at = k + row * k_stride + head * dim
        v_at = v + row * v_stride + head * dim
        acc0, acc1, top, total = attend_block(
            q0, q1, k_at, v_at, bias, None, acc0, acc1, top, total, scale_log2, dim, d0, d1
        )
    to = out + at * out_stride + head * dim
    finish(to, mine, acc0, acc1, total, 1.0, out.dtype.element_ty, dim, d0, d1)


def launch_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bounds: torch.Tensor,
    k_bounds: torch.Tensor,
    longest: int,
    scale: float,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:  # [T, H, D]
    """Attend within segments: rows of q [T, H, D] to rows of k, v [K, H, D].

    Rows [q_bounds[i], q_bounds[i + 1]) attend to rows [k_bounds[i], k_bounds[i + 1]).

    q_bounds, k_bounds: [S + 1] int32 on the device.
    longest: the maximum number of rows in q of a segment.
    tile: overrides the default tile, in measurements and tests.
    """
    for each in (q, k, v):
        assert each.stride(2) == 1 and each.stride(1) == each.shape[2], "heads lie back to back"
    tokens, heads, dim = q.shape
    cut = HeadTiling.of(dim, q.stride(0), k.stride(0), v.stride(0))
    if tile is None:
        long = TILE_CUT if cut.d1 and device.is_hopper(q.device) else TILE
        tile = TILE_WIDE if q.element_size() > 2 else TILE_SHORT if longest <= 64 else long
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    segments = len(q_bounds) - 1
    room = min(tokens // tile.rows + segments, segments * triton.cdiv(longest, tile.rows))
    sizes = (room, room, 1)  # separate tensors, so that each is aligned
    items, firsts, count = (torch.empty(n, dtype=torch.int32, device=q.device) for n in sizes)
    block = 32
    _list[(triton.cdiv(segments, block),)](
        q_bounds, items, firsts, count, segments, block_m=tile.rows, block=block, num_warps=4
    )
    _attend[(room * heads,)](
        q,
        k,
        v,
        out,
        q_bounds,
        k_bounds,
        items,
        firsts,
        count,
        scale * LOG2_E,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        heads=heads,
        dim=dim,
        d0=cut.d0,
        d1=cut.d1,
        block_m=tile.rows,
        block_n=tile.keys,
        **tile.options,
    )
    return out
