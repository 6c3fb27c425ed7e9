"""Numba code of the kernels of `paged.py`, compiled at first use (`kernel_object.py`)."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numba
import numpy as np

from saccade.plugins.cpu.jit import (
    CACHE_LINE_BYTES,
    bf16_to_f32,
    bits_to_f32,
    exponential,
    f32_to_bf16,
    float32_ptr,
    int32_ptr,
    int64_ptr,
    maximum,
    minimum,
    next_item,
    prefetch,
    uint16_ptr,
)
from saccade.plugins.cpu.kernel_object import Body
from saccade.plugins.cpu.numba_call import BLOCK_KEYS

UNROLLED_TOKENS = 4
"""Number of tokens whose values are added in one pass over a query's sum."""
PREFETCH_TOKENS = 8
"""Prefetch distance in tokens. Without prefetching, a core spends a third of the time waiting."""


@numba.njit(inline="always")
def _value_offset(pages, place):
    """Return the offset of a token's keys or values for these heads, in values.

    pages: (page table, offset of the sequence in it, page size, values per token, offset of the
        first of these heads in a token's values).
    place: the token's position in the sequence.
    """
    table, line, page, slot, base = pages
    return (np.int64(table[line + place // page]) * page + place % page) * slot + base


@numba.njit(inline="always")
def _prefetch_values(address, values):
    for at in range(0, 2 * values, CACHE_LINE_BYTES):
        prefetch(address + at)


@numba.njit(inline="always")
def _score(work, spots, keys, address, pages, start, end, last, heads, group, dim):
    """Compute scores of the keys [start, end), and update each query's maximum score (`tops`)."""
    query, _, scores, tops, _, _ = spots
    for place in range(start, end):
        _prefetch_values(
            address + 2 * _value_offset(pages, minimum(place + PREFETCH_TOKENS, last)),
            heads // group * dim,
        )
        k = _value_offset(pages, place)
        for index in range(heads):
            total = np.float32(0)
            for d in range(dim):
                total += (
                    bf16_to_f32(keys[k + index // group * dim + d]) * work[query + index * dim + d]
                )
            work[scores + index * BLOCK_KEYS + place - start] = total
            work[tops + index] = maximum(work[tops + index], total)


@numba.njit(inline="always")
def _weigh(work, spots, count, heads, dim):
    """Turn scores into weights, and rescale the sums of earlier blocks from the earlier maximum
    (`before`) to the new one (`tops`).
    """
    _, summed, scores, tops, before, masses = spots
    for index in range(heads):
        top = work[tops + index]
        shrunk = exponential(work[before + index] - top)
        work[before + index] = top
        mass = np.float32(0)
        for i in range(index * BLOCK_KEYS, index * BLOCK_KEYS + count):
            weight = exponential(work[scores + i] - top)
            work[scores + i] = weight
            mass += weight
        work[masses + index] = work[masses + index] * shrunk + mass
        for d in range(index * dim, (index + 1) * dim):
            work[summed + d] *= shrunk


@numba.njit(inline="always")
def _sum(work, spots, values, address, pages, start, end, last, heads, group, dim):
    """Add the weighted values [start, end) to each query's sum."""
    _, summed, scores, _, _, _ = spots
    whole = end - (end - start) % UNROLLED_TOKENS
    for place in range(start, whole, UNROLLED_TOKENS):
        for i in range(PREFETCH_TOKENS, PREFETCH_TOKENS + UNROLLED_TOKENS):
            _prefetch_values(
                address + 2 * _value_offset(pages, minimum(place + i, last)), heads // group * dim
            )
        a, b = _value_offset(pages, place), _value_offset(pages, place + 1)
        c, e = _value_offset(pages, place + 2), _value_offset(pages, place + 3)
        for index in range(heads):
            h, to = index // group * dim, summed + index * dim
            w = scores + index * BLOCK_KEYS + place - start
            wa, wb, wc, we = work[w], work[w + 1], work[w + 2], work[w + 3]
            for d in range(dim):
                work[to + d] += (
                    wa * bf16_to_f32(values[a + h + d]) + wb * bf16_to_f32(values[b + h + d])
                ) + (wc * bf16_to_f32(values[c + h + d]) + we * bf16_to_f32(values[e + h + d]))
    for place in range(whole, end):
        a = _value_offset(pages, place)
        for index in range(heads):
            h, to = index // group * dim, summed + index * dim
            weight = work[scores + index * BLOCK_KEYS + place - start]
            for d in range(dim):
                work[to + d] += weight * bf16_to_f32(values[a + h + d])


def attend(dim: int, group: int) -> Body:
    """Return the body for heads of size `dim`, with `group` query heads per key head. One work item
    is one part of a row's heads.

    Processes keys in blocks with an online softmax (Milakov & Gimelshein 2018): each query has a
    running maximum score, a total of weights, and a weighted sum of values.
    """

    def attend(block):
        q, keys, values = uint16_ptr(block[2]), uint16_ptr(block[3]), uint16_ptr(block[4])
        out, table, lines = uint16_ptr(block[5]), int32_ptr(block[6]), int64_ptr(block[7])
        lengths, work = int32_ptr(block[8]), float32_ptr(block[9])
        page, width, kv_heads, parts = block[10], block[11], block[12], block[13]
        scale, mine = bits_to_f32(block[14]), kv_heads // parts
        heads = mine * group
        item = next_item(block)
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
                work[query + i] = bf16_to_f32(q[at + i]) * scale
                work[summed + i] = np.float32(0)
            for index in range(heads):
                work[tops + index] = work[before + index] = -np.float32(np.inf)
                work[masses + index] = np.float32(0)
            for start in range(0, length, BLOCK_KEYS):
                end = minimum(start + BLOCK_KEYS, length)
                last = length - 1
                _score(work, spots, keys, block[3], pages, start, end, last, heads, group, dim)
                _weigh(work, spots, end - start, heads, dim)
                _sum(work, spots, values, block[4], pages, start, end, last, heads, group, dim)
            for index in range(heads):
                share = np.float32(1) / maximum(work[masses + index], np.float32(1e-30))
                for d in range(index * dim, (index + 1) * dim):
                    out[at + d] = f32_to_bf16(work[summed + d] * share)
            item = next_item(block)

    return attend


def decode_blocks() -> Body:
    """Return the body that writes `attention_call.BLOCK_FIELDS` for rows with one token each. One
    work item is one row.
    """

    def decode_blocks(block):
        lines, lengths, blocks = int64_ptr(block[2]), int32_ptr(block[3]), int64_ptr(block[4])
        while True:
            row = next_item(block)
            if row >= block[1]:
                return
            at = 5 * row
            blocks[at] = row
            blocks[at + 1] = 1
            blocks[at + 2] = lines[row] * block[5]
            blocks[at + 3] = lengths[row]
            blocks[at + 4] = lengths[row]

    return decode_blocks
