"""`paged.paged_attention` as Triton kernels: keys and values are read where they lie.

Rows of one token (decode) split their keys among programs, whose parts are merged; all other rows
are one launch, whatever their number and lengths. The query heads that share a key head are rows of
one product. Grids depend on the numbers of rows and tokens alone. Knows tensors only.

Imported only where it runs: on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.kernels import device
from saccade.kernels.attention_gpu import (
    LOG2_E,
    NOTHING,
    HeadCut,
    Tile,
    attend_block,
    begin,
    finish,
)
from saccade.kernels.paged import PagedCache, PagedRows

PROGRAMS = 2 * 132
"""Programs that decode has at least where there are keys enough: two for each multiprocessor of an
H100 or H200.
"""
MOST_SPLITS = 32


DECODE = Tile(rows=16, keys=64, warps=4, stages=3)
PREFILL = Tile(rows=128, keys=64, warps=8, stages=3)
PREFILL_SMALL = Tile(rows=128, keys=32, warps=8, stages=3)
"""Before Hopper products leave from registers: with 64 keys, heads of 128 values would spill."""
PREFILL_WIDE = Tile(rows=64, keys=32, warps=4, stages=2)
"""For 32-bit values, whose blocks take twice the memory."""


@triton.jit
def key_places(table, at, here, slot_stride, head, page: tl.constexpr, dim: tl.constexpr):
    """Where the keys at places `at` [N] of a sequence begin, from the cache's beginning."""
    pages = tl.load(table + at // page, mask=here, other=0).to(tl.int64)
    return (pages * page + at % page) * slot_stride + head * dim


# Where a step's numbers lie depends on how many there are: nothing is compiled for how they do.
@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lines", "kv_lengths"])
def _decode(
    q,
    k_cache,
    v_cache,
    page_table,
    lines,
    kv_lengths,
    out,
    parts,
    logs,
    scale_log2,
    value_scale,
    q_stride,
    line_stride,
    slot_stride,
    splits,
    page: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    d0: tl.constexpr,
    d1: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    kv_heads: tl.constexpr,
    whole: tl.constexpr,
):
    """Program (row, key head, split): one query token to a share of its keys.

    whole: there is one split, which writes `out` [R, Hq, D]; else `parts` [R, Hq, splits, D] and
    `logs` [R, Hq, splits], both float32.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lengths + row)
    each = tl.cdiv(tl.cdiv(length, splits), block_n) * block_n
    first = split * each
    end = tl.minimum(first + each, length)
    table = page_table + tl.load(lines + row) * line_stride

    m = tl.arange(0, block_m)
    mine = m < group
    query = row * (group * kv_heads) + head * group + m
    q_at = q + row.to(tl.int64) * q_stride + (head * group + m) * dim
    q0, q1, acc0, acc1, top, total = begin(q_at, mine, dim, d0, d1)
    for at in tl.range(first, end, block_n):
        cols = at + tl.arange(0, block_n)
        here = cols < end
        place = key_places(table, cols, here, slot_stride, head, page, dim)
        seen = mine[:, None] & here[None, :]
        acc0, acc1, top, total = attend_block(
            q0, q1, k_cache + place, v_cache + place, here, seen, acc0, acc1, top, total,
            scale_log2, dim, d0, d1,
        )  # fmt: skip
    if whole:
        to = out + query.to(tl.int64) * dim
        finish(to, mine, acc0, acc1, total, value_scale, out.dtype.element_ty, dim, d0, d1)
    else:
        to = parts + (query.to(tl.int64) * splits + split) * dim
        finish(to, mine, acc0, acc1, total, value_scale, tl.float32, dim, d0, d1)
        log = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), NOTHING)
        tl.store(logs + query * splits + split, log, mask=mine)


@triton.jit(do_not_specialize=["splits"])
def _merge(parts, logs, out, splits, dim: tl.constexpr, columns: tl.constexpr, most: tl.constexpr):
    """Program (query head of a row): its splits, weighed by their denominators."""
    head = tl.program_id(0).to(tl.int64)
    s, c = tl.arange(0, most), tl.arange(0, columns)
    log = tl.load(logs + head * splits + s, mask=s < splits, other=NOTHING)
    share = tl.exp2(log - tl.max(log, 0))
    known = (s < splits)[:, None] & (c < dim)[None, :]
    x = tl.load(parts + (head * splits + s)[:, None] * dim + c[None, :], mask=known, other=0.0)
    merged = tl.sum(x * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + head * dim + c, merged.to(out.dtype.element_ty), mask=c < dim)


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
    end = length - count + tl.minimum(token + block_q, count)
    for at in tl.range(0, end, block_n):
        cols = at + tl.arange(0, block_n)
        here = cols < end
        place = key_places(table, cols, here, slot_stride, head, page, dim)
        seen = cols[None, :] <= place_q[:, None]
        acc0, acc1, top, total = attend_block(
            q0, q1, k_cache + place, v_cache + place, here, seen, acc0, acc1, top, total,
            scale_log2, dim, d0, d1,
        )  # fmt: skip
    to = out + (at_q * (group * kv_heads) + head_q) * dim
    finish(to, mine, acc0, acc1, total, value_scale, out.dtype.element_ty, dim, d0, d1)


def count_splits(rows: int, kv_heads: int, capacity: int, tile: Tile = DECODE) -> int:
    """Among how many programs the keys of a row are split: enough to fill the device, none that is
    sure to be empty. `capacity`: keys that a row may have at most.
    """
    wanted = -(-PROGRAMS // (rows * kv_heads))
    return max(1, min(wanted, MOST_SPLITS, -(-capacity // tile.keys)))


def launch_paged(
    q: torch.Tensor,
    cache: PagedCache,
    rows: PagedRows,
    scale: float,
    *,
    prefill: Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """`paged.paged_attention` in at most three launches, none of which waits for a value.

    prefill, splits: other than by the rules above, for measurements and tests.
    """
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2], "a token's heads lie back to back"
    assert cache.keys.is_contiguous() and cache.values.is_contiguous()
    assert rows.page_table.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows.singles:
        _launch_decode(q, cache, rows, scale, out, splits)
    if len(rows.kv_lengths) > rows.singles and len(q) > rows.singles:
        _launch_prefill(q, cache, rows, scale, out, prefill)
    return out


def _launch_decode(
    q: torch.Tensor,
    cache: PagedCache,
    rows: PagedRows,
    scale: float,
    out: torch.Tensor,
    splits: int | None,
) -> None:
    count, heads, dim = rows.singles, q.shape[1], q.shape[2]
    kv_heads, cut, tile = cache.keys.shape[1], HeadCut.of(dim), DECODE
    group = heads // kv_heads
    if splits is None:
        capacity = rows.page_table.shape[1] * rows.page_size
        splits = count_splits(count, kv_heads, capacity)
    parts = logs = out
    if splits > 1:
        parts = torch.empty((count, heads, splits, dim), dtype=torch.float32, device=q.device)
        logs = torch.empty((count, heads, splits), dtype=torch.float32, device=q.device)
    _decode[count, kv_heads, splits](
        q,
        cache.keys,
        cache.values,
        rows.page_table,
        rows.lines,
        rows.kv_lengths,
        out,
        parts,
        logs,
        scale * LOG2_E * cache.key_scale,
        cache.value_scale,
        q.stride(0),
        rows.page_table.stride(0),
        cache.keys.stride(0),
        splits,
        page=rows.page_size,
        group=group,
        dim=dim,
        d0=cut.d0,
        d1=cut.d1,
        block_m=max(tile.rows, triton.next_power_of_2(group)),
        block_n=tile.keys,
        kv_heads=kv_heads,
        whole=splits == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        columns, most = triton.next_power_of_2(dim), triton.next_power_of_2(splits)
        _merge[(count * heads,)](
            parts, logs, out, splits, dim=dim, columns=columns, most=most, num_warps=1
        )


def prefill_tile(q: torch.Tensor) -> Tile:
    """What prefill is cut into on the device of `q`."""
    if q.element_size() > 2:
        return PREFILL_WIDE
    return PREFILL if device.has_room(q.device) else PREFILL_SMALL


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
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
