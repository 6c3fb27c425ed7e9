"""Attention for tokens that decode, to keys and values on pages, on CPUs: each key and value is
read once, where it lies, and widened in registers. Knows tensors only.

Imported only where it runs (`ops.X86Ops`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache

import numba
import numpy as np
import torch

from saccade.kernels.reference.paged import PagedCache, PagedRows
from saccade.kernels.x86.jit import (
    LINE,
    Kernel,
    bits,
    claim,
    exponential,
    fetch,
    halves,
    longs,
    narrow,
    real,
    reals,
    wide,
    words,
)

BLOCK_KEYS = 128
"""Keys that are scored before their values are read: what is between stays in a core's cache."""
ABREAST = 4
"""Tokens whose values are added in one pass over a query's sum."""
AHEAD = 8
"""Tokens by which reading is ahead of work: a core left alone waits a third of the time."""


def decode_paged(
    q: torch.Tensor, cache: PagedCache, rows: PagedRows, scale: float
) -> torch.Tensor:  # [R, Hq, D]
    """Attend with q [R, Hq, D], one token per row, to its sequence's keys and values.

    A row's bits depend only on its own sequence.
    """
    q = q.contiguous()  # gated attention's lie between gates
    count, heads, dim = q.shape
    kv_heads = cache.keys.shape[1]
    tensors = (q, cache.keys, cache.values, rows.page_table, rows.lines, rows.kv_lengths)
    assert all(each.is_contiguous() for each in tensors)
    scratch = torch.empty(count * heads * (2 * dim + BLOCK_KEYS + 3))
    out = torch.empty_like(q)
    parts = _parts(count, kv_heads)
    _attend(dim, heads // kv_heads)(
        count * parts,
        count * kv_heads * dim * BLOCK_KEYS,  # about: how long each is need not be known here
        q.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        out.data_ptr(),
        rows.page_table.data_ptr(),
        rows.lines.data_ptr(),
        rows.kv_lengths.data_ptr(),
        scratch.data_ptr(),
        rows.page_size,
        rows.page_table.shape[1],
        kv_heads,
        parts,
        bits(scale),
    )
    return out


def _parts(rows: int, kv_heads: int) -> int:
    """Return how many parts a row's heads are dealt in, so that all threads have work."""
    wanted = -(-torch.get_num_threads() // rows)
    return min(
        (part for part in range(1, kv_heads + 1) if kv_heads % part == 0 and part >= wanted),
        default=kv_heads,
    )


@numba.njit(inline="always")
def _begin(pages, place):
    """Return where a token's keys or values for a row's heads begin, counted in values.

    pages: (table, line, page size, values per slot, values before the first of these heads).
    """
    table, line, page, slot, base = pages
    return (np.int64(table[line + place // page]) * page + place % page) * slot + base


@numba.njit(inline="always")
def _fetch(address, values):
    for at in range(0, 2 * values, LINE):
        fetch(address + at)


@numba.njit(inline="always")
def _score(work, spots, keys, address, pages, start, end, last, heads, group, dim):
    """Score the keys [start, end), and put each query's largest score into the tops."""
    query, _, scores, tops, _, _ = spots
    for place in range(start, end):
        _fetch(address + 2 * _begin(pages, min(place + AHEAD, last)), heads // group * dim)
        k = _begin(pages, place)
        for each in range(heads):
            total = np.float32(0)
            for d in range(dim):
                total += wide(keys[k + each // group * dim + d]) * work[query + each * dim + d]
            work[scores + each * BLOCK_KEYS + place - start] = total
            work[tops + each] = max(work[tops + each], total)


@numba.njit(inline="always")
def _weigh(work, spots, count, heads, dim):
    """Turn scores into weights, beside those from the blocks before, whose tops were `before`."""
    _, summed, scores, tops, before, masses = spots
    for each in range(heads):
        top = work[tops + each]
        shrunk = exponential(work[before + each] - top)
        work[before + each] = top
        mass = np.float32(0)
        for i in range(each * BLOCK_KEYS, each * BLOCK_KEYS + count):
            weight = exponential(work[scores + i] - top)
            work[scores + i] = weight
            mass += weight
        work[masses + each] = work[masses + each] * shrunk + mass
        for d in range(each * dim, (each + 1) * dim):
            work[summed + d] *= shrunk


@numba.njit(inline="always")
def _sum(work, spots, values, address, pages, start, end, last, heads, group, dim):
    """Add the values [start, end), by their weights, to each query's sum."""
    _, summed, scores, _, _, _ = spots
    whole = end - (end - start) % ABREAST
    for place in range(start, whole, ABREAST):
        for i in range(AHEAD, AHEAD + ABREAST):
            _fetch(address + 2 * _begin(pages, min(place + i, last)), heads // group * dim)
        a, b = _begin(pages, place), _begin(pages, place + 1)
        c, e = _begin(pages, place + 2), _begin(pages, place + 3)
        for each in range(heads):
            h, to = each // group * dim, summed + each * dim
            w = scores + each * BLOCK_KEYS + place - start
            wa, wb, wc, we = work[w], work[w + 1], work[w + 2], work[w + 3]
            for d in range(dim):
                work[to + d] += (wa * wide(values[a + h + d]) + wb * wide(values[b + h + d])) + (
                    wc * wide(values[c + h + d]) + we * wide(values[e + h + d])
                )
    for place in range(whole, end):
        a = _begin(pages, place)
        for each in range(heads):
            h, to = each // group * dim, summed + each * dim
            weight = work[scores + each * BLOCK_KEYS + place - start]
            for d in range(dim):
                work[to + d] += weight * wide(values[a + h + d])


@cache
def _attend(dim: int, group: int) -> Kernel:
    """Compile the kernel for heads with `dim` values, `group` queries to a key head.

    An item is a part of a row's heads. Keys are taken in blocks. Each query's largest score so far,
    its weights' mass and their sum of values are kept (Milakov & Gimelshein 2018, online softmax).
    """

    def attend(block):
        q, keys, values = halves(block[2]), halves(block[3]), halves(block[4])
        out, table, lines = halves(block[5]), words(block[6]), longs(block[7])
        lengths, work = words(block[8]), reals(block[9])
        page, width, kv_heads, parts = block[10], block[11], block[12], block[13]
        scale, mine = real(block[14]), kv_heads // parts
        heads = mine * group
        item = claim(block)
        while item < block[1]:
            row, first = item // parts, item % parts * mine
            length, at = int(lengths[row]), (row * kv_heads + first) * group * dim
            pages = (table, lines[row] * width, page, kv_heads * dim, first * dim)
            query = item * heads * (2 * dim + BLOCK_KEYS + 3)
            summed = query + heads * dim
            scores = summed + heads * dim
            tops = scores + heads * BLOCK_KEYS
            before, masses = tops + heads, tops + 2 * heads
            spots = (query, summed, scores, tops, before, masses)
            for i in range(heads * dim):
                work[query + i] = wide(q[at + i]) * scale
                work[summed + i] = np.float32(0)
            for each in range(heads):
                work[tops + each] = work[before + each] = -np.float32(np.inf)
                work[masses + each] = np.float32(0)
            for start in range(0, length, BLOCK_KEYS):
                end = min(start + BLOCK_KEYS, length)
                last = length - 1
                _score(work, spots, keys, block[3], pages, start, end, last, heads, group, dim)
                _weigh(work, spots, end - start, heads, dim)
                _sum(work, spots, values, block[4], pages, start, end, last, heads, group, dim)
            for each in range(heads):
                share = np.float32(1) / max(work[masses + each], np.float32(1e-30))
                for d in range(each * dim, (each + 1) * dim):
                    out[at + d] = narrow(work[summed + d] * share)
            item = claim(block)

    return Kernel(attend)
