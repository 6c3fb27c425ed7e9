"""Decode in `paged_attention_reference` as Triton kernels, for sequences with one new token.

Divides the keys of each sequence into splits (flash-decoding). The size of a split depends only on
the sequence's length and the layer's window, so results are batch-invariant. Keys before the window
are skipped. A list of all splits, the largest first, is made on the device once per step. As many
programs as the GPU can run at once take splits from the list until it is empty, so that a long
sequence does not keep only a few of them busy. Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
import triton
import triton.language as tl

from saccade.kernels import device
from saccade.kernels.reference.paged import DecodeWork, PagedCache, PagedRows
from saccade.plugins.gpu.triton.attention import (
    LOG2_E,
    NOTHING,
    HeadTiling,
    Tile,
    attend_block,
    begin,
    beside_keys,
    beyond,
    finish,
)

PROGRAMS = 3
"""Programs per multiprocessor, as many as fit on an H100. Those that start late find no work."""
MIN_SPLIT_KEYS = 256
"""Minimum keys per split of a long sequence: four blocks, so that loads can be pipelined."""
MAX_KV_SPLITS = 32
"""Maximum splits per sequence. With 8 KV heads, this fills a GPU at batch size 1, and the partial
results stay small.
"""
ROUND = tl.constexpr(64)
"""The number of keys in a split is a multiple of this."""

DECODE = Tile(rows=16, keys=64, warps=4, stages=5)
"""The page lookup and the scores each take a pipeline stage. Loads of keys run two blocks ahead."""
DECODE_LARGE = Tile(rows=16, keys=32, warps=4, stages=5)
"""For heads of more than 128 values, and for 32-bit values."""
DECODE_WIDEST = Tile(rows=16, keys=32, warps=4, stages=2)
"""For heads of more than 256 values: 36 KiB of latents (512 + 64) are loaded while the previous
36 KiB are multiplied.
"""
LATENT_HEADS = 16
"""Query heads per program if all heads share the keys, or its gcd with the number of heads."""
FEWER_STAGES = 3
"""For GPUs with little shared memory, and for large heads with windows, whose registers would
spill: loads run one block ahead.
"""


def decode_tile(q: torch.Tensor, cache: PagedCache) -> Tile:
    """Return the tile for decode on the device of `q`. 8-bit keys and values take registers."""
    if q.shape[2] > 256:
        warps = 8 if cache.keys.element_size() == 1 else DECODE_WIDEST.warps
        return replace(DECODE_WIDEST, keys=64 // q.element_size(), warps=warps)
    tile = DECODE_LARGE if q.shape[2] * q.element_size() > 256 else DECODE
    if not device.has_room(q.device) or (cache.shape.window and tile is DECODE_LARGE):
        return replace(tile, stages=FEWER_STAGES)
    return tile


def head_groups(q: torch.Tensor, cache: PagedCache) -> int:
    """Return the programs per split: one per KV head, or one per `LATENT_HEADS` for latents."""
    heads = q.shape[1]
    return heads // gcd(heads, LATENT_HEADS) if cache.shape.latent else cache.keys.shape[1]


@triton.jit
def key_places(
    table, at, slot_stride, head, page: tl.constexpr, dim: tl.constexpr, latents: tl.constexpr
):
    """The offsets of the keys at positions `at` [N] of a sequence in the cache. latents: all heads
    share the keys.
    """
    pages = tl.load(table + at // page).to(tl.int64)
    places = (pages * page + at % page) * slot_stride
    if not latents:
        places += head * dim
    return places


@triton.jit
def split_keys(length, least, most):
    """The number of keys in each split but the last, for a sequence of `length` keys."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, most), ROUND) * ROUND, least)


@triton.jit
def split_count(length, least, most):
    """The number of splits. An empty sequence has one."""
    return tl.maximum(tl.cdiv(length, split_keys(length, least, most)), 1)


@triton.jit
def keys_within(length, window: tl.constexpr):
    """The number of keys that the last token attends to in a layer with `window` (0: unlimited)."""
    if window > 0:
        length = tl.minimum(length, window)
    return length


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["kv_lengths"])
def _share(
    kv_lengths,
    items,
    begins,
    counts,
    rows,
    kv_heads: tl.constexpr,
    least: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
    window: tl.constexpr,
):
    """Program (block of rows): write the rows' splits to their positions in `items`, the largest
    splits first. The first program writes the number of splits, and resets the number taken.
    """
    r = tl.program_id(0) * block + tl.arange(0, block)
    length = keys_within(tl.load(kv_lengths + r, mask=r < rows, other=0), window)
    size = split_keys(length, least, most)
    count = tl.where(r < rows, split_count(length, least, most), 0)
    first = tl.zeros([block], tl.int32)
    total = 0
    for at in range(0, rows, block):
        o = at + tl.arange(0, block)
        other = keys_within(tl.load(kv_lengths + o, mask=o < rows, other=0), window)
        others = tl.where(o < rows, split_count(other, least, most), 0)
        larger = split_keys(other, least, most)[None, :] - size[:, None]
        before = (larger > 0) | ((larger == 0) & (o[None, :] < r[:, None]))
        first += tl.sum(tl.where(before, others[None, :], 0), 1)
        total += tl.sum(others, 0)
    tl.store(begins + r, first, mask=r < rows)
    p = tl.arange(0, most)
    places = items + first[:, None] + p[None, :]
    tl.store(places, r[:, None] * most + p[None, :], mask=p[None, :] < count[:, None])
    if tl.program_id(0) == 0:
        tl.store(counts, total)
        for head in range(kv_heads):
            tl.store(counts + 1 + head, 0)


@triton.jit
def attend_keys(
    q0,
    q1,
    acc0,
    acc1,
    top,
    total,
    k_cache,
    v_cache,
    table,
    from_key,
    end,
    slot_stride,
    head,
    scale_log2,
    page: tl.constexpr,
    dim: tl.constexpr,
    d0: tl.constexpr,
    d1: tl.constexpr,
    block_n: tl.constexpr,
):
    """Attend to all keys [from_key, end) of a sequence. Returns (acc0, acc1, top, total)."""
    for at in tl.range(from_key, end, block_n):
        cols, bias = beyond(at + tl.arange(0, block_n), end)
        place = key_places(table, cols, slot_stride, head, page, dim, v_cache is None)
        acc0, acc1, top, total = attend_block(
            q0, q1, k_cache + place, None if v_cache is None else v_cache + place, bias, None,
            acc0, acc1, top, total, scale_log2, dim, d0, d1,
        )  # fmt: skip
    return acc0, acc1, top, total


# The alignment of these depends on the size of the step. Do not compile a variant for each.
@triton.jit(do_not_specialize_on_alignment=["lines", "kv_lengths"])
def _decode(
    q,
    k_cache,
    v_cache,
    page_table,
    lines,
    kv_lengths,
    items,
    counts,
    out,
    parts,
    logs,
    scale_log2,
    value_scale,
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
    kv_heads: tl.constexpr,
    least: tl.constexpr,
    most: tl.constexpr,
    window: tl.constexpr,
):
    """Program (any, key head): take splits until none is left. The only split of a row is written
    to `out` [R, Hq, D]. One of several is written to `parts` [items, Hq, D] and `logs` [items, Hq],
    both float32.
    """
    head, m = tl.program_id(1), tl.arange(0, block_m)
    mine, total_items = m < group, tl.load(counts)
    item = tl.atomic_add(counts + 1 + head, 1)
    while item < total_items:
        known = tl.load(items + item)
        row, piece = known // most, known % most
        length, table = tl.load(kv_lengths + row), page_table + tl.load(lines + row) * line_stride
        seen = keys_within(length, window)
        each = split_keys(seen, least, most)
        from_key = length - seen + piece * each
        end = tl.minimum(from_key + each, length)
        q_at = q + row.to(tl.int64) * q_stride + (head * group + m) * dim
        q0, q1, acc0, acc1, top, total = begin(q_at, mine, dim, d0, d1)
        q0, q1 = beside_keys(q0, k_cache), beside_keys(q1, k_cache)
        acc0, acc1, top, total = attend_keys(
            q0, q1, acc0, acc1, top, total, k_cache, v_cache, table, from_key, end,
            slot_stride, head, scale_log2, page, dim, d0, d1, block_n,
        )  # fmt: skip
        if seen <= each:
            to = out + (row.to(tl.int64) * kv_heads * group + head * group + m) * dim
            finish(to, mine, acc0, acc1, total, value_scale, out.dtype.element_ty, dim, d0, d1)
        else:
            query = item.to(tl.int64) * (kv_heads * group) + head * group + m
            finish(
                parts + query * dim, mine, acc0, acc1, total, value_scale, tl.float32, dim, d0, d1
            )
            tl.store(logs + query, top + tl.log2(total), mask=mine)
        item = tl.atomic_add(counts + 1 + head, 1)


@triton.jit(do_not_specialize_on_alignment=["kv_lengths"])
def _merge(
    parts,
    logs,
    begins,
    counts,
    kv_lengths,
    out,
    dim: tl.constexpr,
    columns: tl.constexpr,
    kv_heads: tl.constexpr,
    least: tl.constexpr,
    most: tl.constexpr,
    window: tl.constexpr,
):
    """Program (row, query head): merge the row's splits, if there are several, weighted by their
    denominators. Also resets the number of splits taken, for the next layer.
    """
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if (row == 0) & (head < kv_heads):
        tl.store(counts + 1 + head, 0)
    count = split_count(keys_within(tl.load(kv_lengths + row), window), least, most)
    if count == 1:
        return
    s, c = tl.arange(0, most), tl.arange(0, columns)
    query = (tl.load(begins + row) + s).to(tl.int64) * heads + head
    log = tl.load(logs + query, mask=s < count, other=NOTHING)
    share = tl.exp2(log - tl.max(log, 0))
    known = (s < count)[:, None] & (c < dim)[None, :]
    x = tl.load(parts + query[:, None] * dim + c[None, :], mask=known, other=0.0)
    merged = tl.sum(x * share[:, None], 0) / tl.sum(share, 0)
    to = out + (row.to(tl.int64) * heads + head) * dim + c
    tl.store(to, merged.to(out.dtype.element_ty), mask=c < dim)


def share_keys(
    rows: PagedRows, kv_heads: int, piece: int = MIN_SPLIT_KEYS, window: int | None = None
) -> DecodeWork:
    """Return the list of splits for a step's sequences with one token, in layers with this window.

    piece: the minimum number of keys per split, a multiple of 64.

    This takes one launch, which must precede the launches that use the list on the stream.
    """
    assert piece % ROUND.value == 0
    capacity = rows.page_table.shape[1] * rows.page_size
    capacity = min(capacity, window or capacity)
    room = rows.singles * min(MAX_KV_SPLITS, -(-capacity // piece))
    sizes, block = (room, rows.singles, 1 + kv_heads), 32
    items, begins, counts = (rows.kv_lengths.new_empty(size) for size in sizes)
    _share[(triton.cdiv(rows.singles, block),)](
        rows.kv_lengths,
        items,
        begins,
        counts,
        rows.singles,
        kv_heads=kv_heads,
        least=piece,
        most=MAX_KV_SPLITS,
        block=block,
        window=window or 0,
        num_warps=4,
    )
    return DecodeWork(items, begins, counts, piece, window or 0)


def launch_decode(
    q: torch.Tensor, cache: PagedCache, rows: PagedRows, scale: float, out: torch.Tensor
) -> None:
    """Write the attention of the first `rows.singles` tokens to `out`. `rows.work` must be the list
    of splits from `share_keys`.
    """
    work = rows.work
    assert work is not None, "a step's list is made first"
    window = cache.shape.window or 0
    assert work.window == window, "the list is that of layers with another window"
    count, heads, dim = rows.singles, q.shape[1], q.shape[2]
    kv_heads, tile = head_groups(q, cache), decode_tile(q, cache)
    cut = HeadTiling.of(dim, q.stride(0), cache.keys.stride(0))
    group, room = heads // kv_heads, len(work.items)
    parts = torch.empty((room, heads, dim), dtype=torch.float32, device=q.device)
    logs = torch.empty((room, heads), dtype=torch.float32, device=q.device)
    programs = -(-PROGRAMS * device.multiprocessors(q.device) // kv_heads)
    _decode[min(programs, room), kv_heads](
        q,
        cache.keys,
        None if cache.shape.latent else cache.values,
        rows.page_table,
        rows.lines,
        rows.kv_lengths,
        work.items,
        work.counts,
        out,
        parts,
        logs,
        scale * LOG2_E * cache.key_scale,
        cache.value_scale,
        q.stride(0),
        rows.page_table.stride(0),
        cache.keys.stride(0),
        page=rows.page_size,
        group=group,
        dim=dim,
        d0=cut.d0,
        d1=cut.d1,
        block_m=max(tile.rows, triton.next_power_of_2(group)),
        block_n=tile.keys,
        kv_heads=kv_heads,
        least=work.piece,
        most=MAX_KV_SPLITS,
        window=work.window,
        **tile.options,
    )
    columns = triton.next_power_of_2(dim)
    _merge[count, heads](
        parts,
        logs,
        work.begins,
        work.counts,
        rows.kv_lengths,
        out,
        dim=dim,
        columns=columns,
        kv_heads=kv_heads,
        least=work.piece,
        most=MAX_KV_SPLITS,
        window=work.window,
        num_warps=max(1, columns // 128),
    )
