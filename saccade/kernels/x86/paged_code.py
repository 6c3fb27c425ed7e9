"""The instructions of `paged.py`'s kernel, compiled by Numba when a machine first asks for them
(`kernel_object.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numba
import numpy as np

from saccade.kernels.x86.jit import (
    LINE,
    claim,
    exponential,
    fetch,
    halves,
    larger,
    longs,
    narrow,
    real,
    reals,
    smaller,
    wide,
    words,
)
from saccade.kernels.x86.kernel_object import Body
from saccade.kernels.x86.paged_call import BLOCK_KEYS

ABREAST = 4
"""Tokens whose values are added in one pass over a query's sum."""
AHEAD = 8
"""Tokens by which reading is ahead of work: a core left alone waits a third of the time."""


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
        _fetch(address + 2 * _begin(pages, smaller(place + AHEAD, last)), heads // group * dim)
        k = _begin(pages, place)
        for each in range(heads):
            total = np.float32(0)
            for d in range(dim):
                total += wide(keys[k + each // group * dim + d]) * work[query + each * dim + d]
            work[scores + each * BLOCK_KEYS + place - start] = total
            work[tops + each] = larger(work[tops + each], total)


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
            _fetch(address + 2 * _begin(pages, smaller(place + i, last)), heads // group * dim)
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


def attend(dim: int, group: int) -> Body:
    """Return the body for heads with `dim` values, `group` queries to a key head.

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
            length, at = np.int64(lengths[row]), (row * kv_heads + first) * group * dim
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
                end = smaller(start + BLOCK_KEYS, length)
                last = length - 1
                _score(work, spots, keys, block[3], pages, start, end, last, heads, group, dim)
                _weigh(work, spots, end - start, heads, dim)
                _sum(work, spots, values, block[4], pages, start, end, last, heads, group, dim)
            for each in range(heads):
                share = np.float32(1) / larger(work[masses + each], np.float32(1e-30))
                for d in range(each * dim, (each + 1) * dim):
                    out[at + d] = narrow(work[summed + d] * share)
            item = claim(block)

    return attend


def lay_out_singles() -> Body:
    """Return the body that describes rows with one token each (`attention_call.BLOCK`).

    An item is a row.
    """

    def lay_out_singles(block):
        lines, lengths, blocks = longs(block[2]), words(block[3]), longs(block[4])
        while True:
            row = claim(block)
            if row >= block[1]:
                return
            at = 5 * row
            blocks[at] = row
            blocks[at + 1] = 1
            blocks[at + 2] = lines[row] * block[5]
            blocks[at + 3] = lengths[row]
            blocks[at + 4] = lengths[row]

    return lay_out_singles
