"""`paged.paged_attention` as Triton kernels: keys and values are read where they lie.

Rows of one token (decode) are `paged_decode_gpu.py`'s; all other rows are one launch, whatever
their number and lengths. The query heads that share a key head are rows of one product. Grids
depend on the numbers of rows and tokens alone. Knows tensors only.

Imported only where it runs: on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from saccade.kernels import device
from saccade.kernels.attention_gpu import LOG2_E, HeadCut, Tile, attend_block, begin, finish
from saccade.kernels.paged import PagedCache, PagedRows
from saccade.kernels.paged_decode_gpu import LEAST_PIECE, key_places, launch_decode, share_keys

PREFILL = Tile(rows=128, keys=64, warps=8, stages=3)
PREFILL_SMALL = Tile(rows=128, keys=32, warps=8, stages=3)
"""Before Hopper products leave from registers: with 64 keys, heads of 128 values would spill."""
PREFILL_LARGE = Tile(rows=128, keys=32, warps=8, stages=3)
"""For heads beyond 128."""
PREFILL_LARGE_SMALL = Tile(rows=64, keys=32, warps=8, stages=2)
"""The same before Hopper, where 99 KB of memory may be all that there is."""
PREFILL_WIDE = Tile(rows=64, keys=32, warps=4, stages=2)
"""For 32-bit values, whose blocks take twice the memory."""


@triton.jit
def find_row(q_starts, first, rows, block, block_q: tl.constexpr):
    """(row, its first token in the row) of a block of `block_q` tokens of the rows [first, rows).

    Row r's blocks begin at (its first token from the first row's on) // block_q + r - first: no two
    rows share a block, and a few blocks stay empty.
    """
    base = tl.load(q_starts + first)
    low, high = first, rows  # the last row whose blocks begin at or before this one
    while high - low > 1:
        mid = (low + high) // 2
        if (tl.load(q_starts + mid) - base) // block_q + mid - first <= block:
            low = mid
        else:
            high = mid
    begins = (tl.load(q_starts + low) - base) // block_q + low - first
    return low, (block - begins) * block_q


@triton.jit(
    do_not_specialize=["first", "rows"],
    do_not_specialize_on_alignment=["lines", "q_starts", "kv_lengths"],
)
def _prefill(
    q,
    k_cache,
    v_cache,
    page_table,
    lines,
    q_starts,
    kv_lengths,
    out,
    scale_log2,
    value_scale,
    first,
    rows,
    q_stride,
    line_stride,
    slot_stride,
    page: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    d0: tl.constexpr,
    d1: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_q: tl.constexpr,
    kv_heads: tl.constexpr,
):
    """Program (block, key head): `block_q` tokens of one of the rows [first, rows)."""
    block, head = tl.program_id(0), tl.program_id(1)
    row, token = find_row(q_starts, first, rows, block, block_q)
    start = tl.load(q_starts + row)
    count = tl.load(q_starts + row + 1) - start
    if token >= count:
        return
    length = tl.load(kv_lengths + row)
    table = page_table + tl.load(lines + row) * line_stride

    m = tl.arange(0, block_m)
    mine = (m < block_q * group) & (token + m // group < count)
    place_q = length - count + token + m // group  # in the sequence
    head_q = head * group + m % group
    at_q = (start + token + m // group).to(tl.int64)
    q_at = q + at_q * q_stride + head_q * dim
    q0, q1, acc0, acc1, top, total = begin(q_at, mine, dim, d0, d1)
    # Blocks that all of them see, then those about the diagonal.
    whole = (length - count + token + 1) // block_n * block_n
    end = length - count + tl.minimum(token + block_q, count)
    for at in tl.range(0, whole, block_n):
        cols = at + tl.arange(0, block_n)
        place = key_places(table, cols, slot_stride, head, page, dim)
        acc0, acc1, top, total = attend_block(
            q0, q1, k_cache + place, v_cache + place, None, None, acc0, acc1, top, total,
            scale_log2, dim, d0, d1,
        )  # fmt: skip
    for at in tl.range(whole, end, block_n):
        cols = at + tl.arange(0, block_n)
        seen = cols[None, :] <= place_q[:, None]
        place = key_places(table, tl.minimum(cols, end - 1), slot_stride, head, page, dim)
        acc0, acc1, top, total = attend_block(
            q0, q1, k_cache + place, v_cache + place, None, seen, acc0, acc1, top, total,
            scale_log2, dim, d0, d1,
        )  # fmt: skip
    to = out + (at_q * (group * kv_heads) + head_q) * dim
    finish(to, mine, acc0, acc1, total, value_scale, out.dtype.element_ty, dim, d0, d1)


def launch_paged(
    q: torch.Tensor,
    cache: PagedCache,
    rows: PagedRows,
    scale: float,
    *,
    prefill: Tile | None = None,
    piece: int | None = None,
) -> torch.Tensor:
    """`paged.paged_attention` in at most three launches, and one more where the step's list of
    pieces is not made; none waits for a value.

    prefill, piece: other than by the rules, for measurements and tests.
    """
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2], "a token's heads lie back to back"
    assert cache.keys.is_contiguous() and cache.values.is_contiguous()
    assert rows.page_table.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows.singles:
        if rows.work is None or piece is not None:
            kv_heads = cache.keys.shape[1]
            rows = replace(rows, work=share_keys(rows, kv_heads, piece or LEAST_PIECE))
        launch_decode(q, cache, rows, scale, out)
    if len(rows.kv_lengths) > rows.singles and len(q) > rows.singles:
        _launch_prefill(q, cache, rows, scale, out, prefill)
    return out


def prefill_tile(q: torch.Tensor) -> Tile:
    """What prefill is cut into on the device of `q`."""
    if q.element_size() > 2:
        return PREFILL_WIDE
    large, room = q.shape[2] > 128, device.has_room(q.device)
    if large:
        return PREFILL_LARGE if room else PREFILL_LARGE_SMALL
    return PREFILL if room else PREFILL_SMALL


def _launch_prefill(
    q: torch.Tensor,
    cache: PagedCache,
    rows: PagedRows,
    scale: float,
    out: torch.Tensor,
    tile: Tile | None,
) -> None:
    heads, dim = q.shape[1], q.shape[2]
    kv_heads, cut = cache.keys.shape[1], HeadCut.of(dim)
    group = heads // kv_heads
    tile = tile or prefill_tile(q)
    block_m = max(tile.rows, triton.next_power_of_2(group))
    block_q = block_m // group
    count = len(rows.kv_lengths) - rows.singles
    blocks = (len(q) - rows.singles) // block_q + count
    _prefill[blocks, kv_heads](
        q,
        cache.keys,
        cache.values,
        rows.page_table,
        rows.lines,
        rows.q_starts,
        rows.kv_lengths,
        out,
        scale * LOG2_E * cache.key_scale,
        cache.value_scale,
        rows.singles,
        len(rows.kv_lengths),
        q.stride(0),
        rows.page_table.stride(0),
        cache.keys.stride(0),
        page=rows.page_size,
        group=group,
        dim=dim,
        d0=cut.d0,
        d1=cut.d1,
        block_m=block_m,
        block_n=tile.keys,
        block_q=block_q,
        kv_heads=kv_heads,
        **tile.options,
    )
