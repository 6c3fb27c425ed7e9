"""The vision tower's attention within segments (`attention.attend_segments`) as a Triton kernel.

All segments are one launch. Heads of 72 cost 80. Knows tensors only.

Imported only where it runs: on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.kernels.attention_gpu import LOG2_E, HeadCut, Tile, attend_block, begin, finish

TILE = Tile(rows=128, keys=64, warps=8, stages=3)
TILE_WIDE = Tile(rows=64, keys=32, warps=4, stages=2)
"""For 32-bit values, whose blocks take twice the memory."""
TILE_SHORT = Tile(rows=64, keys=64, warps=4, stages=3)
"""For segments of at most 64 rows (windows)."""


@triton.jit
def _attend(
    q,
    k,
    v,
    out,
    q_bounds,
    k_bounds,
    scale_log2,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    dim: tl.constexpr,
    d0: tl.constexpr,
    d1: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Program (block of rows, head, segment)."""
    segment, head = tl.program_id(2), tl.program_id(1)
    start = tl.load(q_bounds + segment)
    count = tl.load(q_bounds + segment + 1) - start
    first = tl.program_id(0) * block_m
    if first >= count:
        return
    k_start = tl.load(k_bounds + segment)
    keys = tl.load(k_bounds + segment + 1) - k_start

    m = first + tl.arange(0, block_m)
    mine = m < count
    at = (start + m).to(tl.int64)
    q_at = q + at * q_stride + head * dim
    q0, q1, acc0, acc1, top, total = begin(q_at, mine, dim, d0, d1)
    for n in tl.range(0, keys, block_n):
        cols = n + tl.arange(0, block_n)
        here = cols < keys
        row = (k_start + cols).to(tl.int64)
        k_at = k + row * k_stride + head * dim
        v_at = v + row * v_stride + head * dim
        acc0, acc1, top, total = attend_block(
            q0, q1, k_at, v_at, here, here[None, :], acc0, acc1, top, total,
            scale_log2, dim, d0, d1,
        )  # fmt: skip
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
    """Rows [q_bounds[i], q_bounds[i + 1]) of q [T, H, D] attend to rows [k_bounds[i],
    k_bounds[i + 1]) of k, v [K, H, D].

    q_bounds, k_bounds: [S + 1] int32 on the device. longest: rows of q of a segment at most. tile:
    other than by the rule, for measurements and tests.
    """
    for each in (q, k, v):
        assert each.stride(2) == 1 and each.stride(1) == each.shape[2], "heads lie back to back"
    tokens, heads, dim = q.shape
    cut = HeadCut.of(dim)
    if tile is None:
        tile = TILE_WIDE if q.element_size() > 2 else TILE_SHORT if longest <= 64 else TILE
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    _attend[triton.cdiv(longest, tile.rows), heads, len(q_bounds) - 1](
        q,
        k,
        v,
        out,
        q_bounds,
        k_bounds,
        scale * LOG2_E,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        dim=dim,
        d0=cut.d0,
        d1=cut.d1,
        block_m=tile.rows,
        block_n=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
