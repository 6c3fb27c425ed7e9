"""`paged.paged_attention_reference` as Triton kernels, which read keys and values from the pages.

Sequences with one new token (decode) use `triton/paged_decode.py`. All others share one launch, for
any number of rows and any lengths. With few tokens, the keys are split, and a second launch merges
the partial results. Query heads that share a KV head are rows of one product. Grids depend only on
the numbers of sequences and tokens. In a layer with a window, blocks of keys that none of a block's
queries attend to are skipped. The window is a compile-time constant, so layers without one pay
nothing for it.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from saccade.kernels import device
from saccade.kernels.reference.paged import PagedCache, PagedRows
from saccade.plugins.gpu.triton.attention import (
    LOG2_E,
    NOTHING,
    HeadTiling,
    Tile,
    attend_block,
    begin,
    beside_keys,
    finish,
)
from saccade.plugins.gpu.triton.paged_decode import (
    MIN_SPLIT_KEYS,
    ROUND,
    head_groups,
    key_places,
    launch_decode,
    share_keys,
    split_count,
    split_keys,
)

MAX_SPLITS = 8
"""Maximum KV splits per sequence in a launch with few tokens. Many tokens fill enough blocks."""
SPLIT_TOKENS = 512
"""Maximum product of tokens and splits in a launch, to keep the partial results small."""
MIN_PREFILL_SPLIT_KEYS = 1024
"""Minimum number of keys per split."""

PREFILL = Tile(rows=128, keys=64, warps=8, stages=3)
PREFILL_HOPPER = replace(PREFILL, registers=128)
"""Two programs fit on a multiprocessor, at the cost of some register spills: one multiplies while
the other computes exponentials. An H200 reaches 421 TFLOP/s, and 309 with one program (`gpu_check`,
3,650 tokens over 25,600).
"""
PREFILL_SMALL = Tile(rows=128, keys=32, warps=8, stages=3)
"""Before Hopper, products are kept in registers. With 64 keys, heads of 128 values would spill."""
PREFILL_THIN_SMALL = Tile(rows=64, keys=32, warps=4, stages=3)
"""For heads up to 64 values before Hopper: three programs fit, and one of 128 rows would spill."""
PREFILL_LARGE = Tile(rows=128, keys=32, warps=8, stages=3)
"""For heads of more than 128 values. With a window, Blackwell's registers allow one stage fewer."""
PREFILL_LARGE_SMALL = Tile(rows=64, keys=32, warps=8, stages=2)
"""For heads of more than 128 values before Hopper, where some GPUs have 99 KB of shared memory."""
PREFILL_WIDE = Tile(rows=64, keys=32, warps=4, stages=2)
"""For 32-bit values, whose blocks take twice the memory."""
PREFILL_WIDEST = Tile(rows=32, keys=32, warps=8, stages=2)
"""For heads of more than 256 values: two tokens of 16 heads take 74 KB with latents, or 98 KB if
the values are separate. With 64 rows, the minimum for Hopper's products, registers would spill.
"""


@triton.jit
def find_row(q_starts, first, rows, block, block_q: tl.constexpr):
    """(row, index of the block's first token in it) for a block of `block_q` tokens.

    Blocks cover the rows [first, rows). Those of row r start at (its first token, relative to row
    `first`) // block_q + r - first, so no block belongs to two rows, and a few blocks are empty.
    """
    base = tl.load(q_starts + first)
    low, high = first, rows  # search the last row whose blocks start at or before this one
    while high - low > 1:
        mid = (low + high) // 2
        if (tl.load(q_starts + mid) - base) // block_q + mid - first <= block:
            low = mid
        else:
            high = mid
    begins = (tl.load(q_starts + low) - base) // block_q + low - first
    return low, (block - begins) * block_q


@triton.jit
def keys_before(length, count, window: tl.constexpr):
    """The number of leading keys of a row of `length` that none of its last `count` tokens attends
    to, in a layer with `window` (0: unlimited), rounded down to a multiple of `ROUND`.
    """
    skipped = 0
    if window > 0:
        skipped = tl.maximum(length - count - window + 1, 0) // ROUND * ROUND
    return skipped


@triton.jit
def attend_masked(
    q0,
    q1,
    acc0,
    acc1,
    top,
    total,
    k_cache,
    v_cache,
    table,
    place_q,
    reach,
    from_key,
    to_key,
    end,
    slot_stride,
    head,
    scale_log2,
    page: tl.constexpr,
    dim: tl.constexpr,
    d0: tl.constexpr,
    d1: tl.constexpr,
    block_n: tl.constexpr,
    window: tl.constexpr,
):
    """Attend to keys [from_key, to_key) with masks: each query attends to keys before its `reach`
    [M] and within its window. All keys from `end` on are masked.
    """
    for at in tl.range(from_key, to_key, block_n):
        cols = at + tl.arange(0, block_n)
        seen = cols[None, :] < reach[:, None]
        if window > 0:
            seen = seen & (cols[None, :] > place_q[:, None] - window)
        last = tl.minimum(cols, end - 1)
        place = key_places(table, last, slot_stride, head, page, dim, v_cache is None)
        acc0, acc1, top, total = attend_block(
            q0, q1, k_cache + place, None if v_cache is None else v_cache + place, None, seen,
            acc0, acc1, top, total, scale_log2, dim, d0, d1,
        )  # fmt: skip
    return acc0, acc1, top, total


@triton.jit
def attend_causal(
    q0,
    q1,
    acc0,
    acc1,
    top,
    total,
    k_cache,
    v_cache,
    table,
    place_q,
    reach,
    from_key,
    end,
    before,
    tokens,
    least_seen,
    slot_stride,
    head,
    scale_log2,
    page: tl.constexpr,
    dim: tl.constexpr,
    d0: tl.constexpr,
    d1: tl.constexpr,
    block_n: tl.constexpr,
    window: tl.constexpr,
):
    """Attend to keys [from_key, end) of a sequence. Returns (acc0, acc1, top, total).

    The queries are those of `tokens` tokens at positions from `before` on. The first one attends to
    `least_seen` keys, and none to keys from `end` on. Blocks of keys that all queries attend to are
    computed without masks.
    """
    whole = least_seen // block_n * block_n
    if window > 0:
        from_key = tl.maximum(from_key, (before - window + 1) // block_n * block_n)
        full = tl.cdiv(tl.maximum(before + tokens - window, 0), block_n) * block_n
        acc0, acc1, top, total = attend_masked(
            q0, q1, acc0, acc1, top, total, k_cache, v_cache, table, place_q, reach,
            from_key, tl.minimum(full, end), end, slot_stride, head, scale_log2,
            page, dim, d0, d1, block_n, window,
        )  # fmt: skip
        from_key = tl.maximum(from_key, full)
    for at in tl.range(from_key, tl.minimum(whole, end), block_n):
        cols = at + tl.arange(0, block_n)
        place = key_places(table, cols, slot_stride, head, page, dim, v_cache is None)
        acc0, acc1, top, total = attend_block(
            q0, q1, k_cache + place, None if v_cache is None else v_cache + place, None, None,
            acc0, acc1, top, total, scale_log2, dim, d0, d1,
        )  # fmt: skip
    return attend_masked(
        q0, q1, acc0, acc1, top, total, k_cache, v_cache, table, place_q, reach,
        tl.maximum(from_key, whole), end, end, slot_stride, head, scale_log2,
        page, dim, d0, d1, block_n, window,
    )  # fmt: skip


@triton.jit
def keys_reached(sees, first, at_q, mine, place_q, before, tokens):
    """How many of a sequence's keys queries attend to: each query [M], the first token, and the
    last of `tokens`. They attend to the keys up to their own, or as `sees` specifies.
    """
    if sees is not None:
        reach = tl.load(sees + at_q, mask=mine, other=0).to(tl.int32)
        least_seen = tl.load(sees + first).to(tl.int32)
        most_seen = tl.load(sees + first + tokens - 1).to(tl.int32)
    else:
        reach, least_seen, most_seen = place_q + 1, before + 1, before + tokens
    return reach, least_seen, most_seen


@triton.jit(
    do_not_specialize=["first", "rows"],
    do_not_specialize_on_alignment=["lines", "q_starts", "kv_lengths", "sees"],
)
def _prefill(
    q,
    k_cache,
    v_cache,
    page_table,
    lines,
    q_starts,
    kv_lengths,
    sees,
    out,
    parts,
    logs,
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
    least: tl.constexpr,
    window: tl.constexpr,
):
    """Program (key head, block, split): `block_q` tokens of one of the rows [first, rows), starting
    with the last block. A row with one split is written to `out`, others to `parts` [tokens,
    splits, Hq, D] and `logs` [tokens, splits, Hq], both float32.
    """
    head, piece, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    row, token = find_row(q_starts, first, rows, tl.num_programs(1) - 1 - tl.program_id(1), block_q)
    start, length = tl.load(q_starts + row), tl.load(kv_lengths + row)
    count = tl.load(q_starts + row + 1) - start
    skipped = keys_before(length, count, window)
    each = split_keys(length - skipped, least, splits)
    if (token >= count) | (piece >= split_count(length - skipped, least, splits)):
        return
    m, table = tl.arange(0, block_m), page_table + tl.load(lines + row) * line_stride
    mine = (m < block_q * group) & (token + m // group < count)
    before, tokens = length - count + token, tl.minimum(block_q, count - token)  # of this block
    place_q, head_q = before + m // group, head * group + m % group
    heads, at_q = group * tl.num_programs(0), (start + token + m // group).to(tl.int64)
    q0, q1, acc0, acc1, top, total = begin(q + at_q * q_stride + head_q * dim, mine, dim, d0, d1)
    q0, q1 = beside_keys(q0, k_cache), beside_keys(q1, k_cache)
    reach, fewest, most = keys_reached(sees, start + token, at_q, mine, place_q, before, tokens)
    acc0, acc1, top, total = attend_causal(
        q0, q1, acc0, acc1, top, total, k_cache, v_cache, table, place_q, reach,
        skipped + piece * each, tl.minimum(skipped + (piece + 1) * each, most), before, tokens,
        fewest, slot_stride, head, scale_log2, page, dim, d0, d1, block_n, window,
    )  # fmt: skip
    if length - skipped <= each:
        to = out + (at_q * heads + head_q) * dim
        finish(to, mine, acc0, acc1, total, value_scale, out.dtype.element_ty, dim, d0, d1)
    else:
        part = ((at_q - first) * splits + piece) * heads + head_q
        finish(parts + part * dim, mine, acc0, acc1, total, value_scale, tl.float32, dim, d0, d1)
        tl.store(logs + part, top + tl.log2(tl.maximum(total, 1.0)), mask=mine)


@triton.jit(
    do_not_specialize=["first", "rows", "splits"],
    do_not_specialize_on_alignment=["q_starts", "kv_lengths"],
)
def _join(
    parts,
    logs,
    q_starts,
    kv_lengths,
    out,
    first,
    rows,
    splits,
    dim: tl.constexpr,
    columns: tl.constexpr,
    least: tl.constexpr,
    most: tl.constexpr,
    window: tl.constexpr,
):
    """Program (token of the rows [first, rows), query head): merge the splits of its row, if there
    are several, weighted by their denominators.
    """
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, beyond = first, rows  # search the token's row
    while beyond - row > 1:
        mid = (row + beyond) // 2
        if tl.load(q_starts + mid) <= first + token:
            row = mid
        else:
            beyond = mid
    length, end = tl.load(kv_lengths + row), tl.load(q_starts + row + 1)
    if window > 0:
        length -= keys_before(length, end - tl.load(q_starts + row), window)
    count = split_count(length, least, splits)
    if (count == 1) | (first + token >= end):
        return
    s, c = tl.arange(0, most), tl.arange(0, columns)
    part = (token.to(tl.int64) * splits + s) * heads + head
    log = tl.load(logs + part, mask=s < count, other=NOTHING)
    share = tl.exp2(log - tl.max(log, 0))
    known = (s < count)[:, None] & (c < dim)[None, :]
    x = tl.load(parts + part[:, None] * dim + c[None, :], mask=known, other=0.0)
    merged = tl.sum(x * share[:, None], 0) / tl.sum(share, 0)
    to = out + ((first + token).to(tl.int64) * heads + head) * dim + c
    tl.store(to, merged.to(out.dtype.element_ty), mask=c < dim)


def launch_paged(
    q: torch.Tensor,
    cache: PagedCache,
    rows: PagedRows,
    scale: float,
    *,
    prefill: Tile | None = None,
    piece: int | None = None,
) -> torch.Tensor:
    """Compute `paged_attention_reference` in at most four launches, without host synchronization.

    Takes one more launch if the step's list of KV splits has not been made yet. prefill: overrides
    the default tile, in measurements and tests.
    piece: overrides the default split size, in measurements and tests.
    """
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2], "a token's heads lie back to back"
    assert cache.keys.is_contiguous() and cache.values.is_contiguous()
    assert rows.page_table.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows.singles:
        if rows.work is None or piece is not None:
            groups = head_groups(q, cache)
            work = share_keys(rows, groups, piece or MIN_SPLIT_KEYS, cache.shape.window)
            rows = replace(rows, work=work)
        launch_decode(q, cache, rows, scale, out)
    if len(rows.kv_lengths) > rows.singles and len(q) > rows.singles:
        launch_prefill(q, cache, rows, scale, out, prefill, piece or MIN_PREFILL_SPLIT_KEYS)
    return out


def prefill_tile(q: torch.Tensor, window: int | None = None, *, plain: bool = False) -> Tile:
    """Return the tile for prefill on the device of `q`, in layers with this window.

    plain: the result of `is_plain`.
    """
    large, room = q.shape[2] > 128, device.has_room(q.device)
    if q.shape[2] > 256:
        return replace(PREFILL_WIDEST, rows=64 // q.element_size(), keys=64 // q.element_size())
    if q.element_size() > 2:
        return PREFILL_WIDE
    if large or (window and q.shape[2] > 64 and not room):  # registers for masks would spill
        wide = replace(PREFILL_LARGE, stages=2) if window else PREFILL_LARGE
        return wide if room else PREFILL_LARGE_SMALL
    if room:
        return PREFILL_HOPPER if plain else PREFILL
    return PREFILL_THIN_SMALL if q.shape[2] <= 64 else PREFILL_SMALL


def is_plain(cache: PagedCache, q: torch.Tensor) -> bool:
    """Return True if two programs of the kernel fit into a Hopper multiprocessor's registers.

    Masks for windows and images, and 8-bit keys, need too many registers.
    """
    masked = cache.shape.window or cache.shape.both_ways
    return device.is_hopper(q.device) and not masked and cache.keys.dtype == q.dtype


def prefill_splits(tokens: int, capacity: int, piece: int) -> int:
    """Return the maximum number of programs that share a sequence's keys.

    tokens: the number of tokens in the launch.

    With few tokens there are few blocks, so keys are split. Where they are split depends only on
    the length of the sequence and on the returned number.
    """
    splits = MAX_SPLITS
    while splits > 1 and splits * tokens > SPLIT_TOKENS:
        splits //= 2
    return max(1, min(splits, -(-capacity // piece)))


def most_keys(rows: PagedRows, tokens: int, window: int) -> int:
    """Return the maximum number of keys to which the tokens of one sequence attend in a launch."""
    capacity = rows.page_table.shape[1] * rows.page_size
    return min(capacity, tokens + window + ROUND.value) if window else capacity


def launch_prefill(
    q: torch.Tensor,
    cache: PagedCache,
    rows: PagedRows,
    scale: float,
    out: torch.Tensor,
    tile: Tile | None = None,
    piece: int = MIN_PREFILL_SPLIT_KEYS,
) -> None:
    """Write the attention of all tokens after the first `rows.singles` to `out`."""
    heads, dim, kv_heads = q.shape[1], q.shape[2], head_groups(q, cache)
    cut = HeadTiling.of(dim, q.stride(0), cache.keys.stride(0))
    group, window = heads // kv_heads, cache.shape.window or 0
    tile = tile or prefill_tile(q, cache.shape.window, plain=is_plain(cache, q))
    block_m = max(tile.rows, triton.next_power_of_2(group))
    block_q = block_m // group
    first, count = rows.singles, len(rows.kv_lengths)
    tokens = len(q) - first
    splits = prefill_splits(tokens, most_keys(rows, tokens, window), piece)
    room = tokens * heads * splits if splits > 1 else 0
    parts = torch.empty(room * dim, dtype=torch.float32, device=q.device)
    logs = torch.empty(room, dtype=torch.float32, device=q.device)
    _prefill[kv_heads, tokens // block_q + count - first, splits](
        q,
        cache.keys,
        None if cache.shape.latent else cache.values,
        rows.page_table,
        rows.lines,
        rows.q_starts,
        rows.kv_lengths,
        rows.sees if cache.shape.both_ways else None,
        out,
        parts,
        logs,
        scale * LOG2_E * cache.key_scale,
        cache.value_scale,
        first,
        count,
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
        least=piece,
        window=window,
        **tile.options,
    )
    if splits > 1:
        shape = {"columns": triton.next_power_of_2(dim), "least": piece, "most": MAX_SPLITS}
        shape |= {"dim": dim, "window": window}
        _join[tokens, heads](
            *(parts, logs, rows.q_starts, rows.kv_lengths, out, first, count, splits),
            **shape,
            num_warps=max(1, shape["columns"] // 256),
        )
