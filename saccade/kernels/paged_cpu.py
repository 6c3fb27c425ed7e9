"""Attention of tokens that decode to keys and values on pages, for CPUs: each key and value is read
once, where it lies, and widened in registers. Knows tensors only.

Imported only where it runs (`device.runs_jit`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from saccade.kernels.jit import (
    Kernel,
    bits,
    claim,
    exponential,
    halves,
    longs,
    narrow,
    real,
    reals,
    wide,
    words,
)
from saccade.kernels.paged import PagedCache, PagedRows

BLOCK_KEYS = 128
"""Keys that are scored before their values are read: what is between stays in a core's cache."""


def scratch_values(rows: int, heads: int, dim: int) -> int:
    """float32 values that `decode_paged` works in, for queries of so many heads."""
    return rows * heads * (2 * dim + BLOCK_KEYS + 3)


def decode_paged(
    q: torch.Tensor, cache: PagedCache, rows: PagedRows, scale: float, scratch: torch.Tensor
) -> torch.Tensor:  # [R, Hq, D]
    """Attention of q [R, Hq, D], one token of each row, to the keys and values of its sequence.

    A row's bits depend on nothing but its own sequence. scratch: `scratch_values`, of any content.
    """
    count, heads, dim = q.shape
    kv_heads = cache.keys.shape[1]
    tensors = (q, cache.keys, cache.values, rows.page_table, rows.lines, rows.kv_lengths)
    assert all(each.is_contiguous() for each in tensors)
    assert scratch.numel() >= scratch_values(count, heads, dim)
    out = torch.empty_like(q)
    parts = _parts(count, kv_heads)
    _attend(dim, heads // kv_heads)(
        count * parts,
        cache.keys.numel(),  # whatever the lengths are, more than a thread is woken for
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
    """How many parts a row's heads are dealt in, so that all threads have work."""
    wanted = -(-torch.get_num_threads() // rows)
    return min(
        (part for part in range(1, kv_heads + 1) if kv_heads % part == 0 and part >= wanted),
        default=kv_heads,
    )


@cache
def _attend(dim: int, group: int) -> Kernel:
    """For heads of `dim` values, `group` queries to a key head. Item: a part of a row's heads."""

    def attend(block):
        q, keys, values, out = halves(block[2]), halves(block[3]), halves(block[4]), halves(block[5])
        table, lines, lengths = words(block[6]), longs(block[7]), words(block[8])
        scratch = reals(block[9])
        page, width, kv_heads, parts, scale = (
            block[10],
            block[11],
            block[12],
            block[13],
            real(block[14]),
        )
        mine = kv_heads // parts
        heads = mine * group
        while True:
            item = claim(block)
            if item >= block[1]:
                return
            row, first = item // parts, item % parts * mine
            line, length = lines[row] * width, np.int64(lengths[row])
            at = (row * kv_heads + first) * group * dim
            query = item * heads * (2 * dim + BLOCK_KEYS + 2)
            summed = query + heads * dim
            scores = summed + heads * dim
            tops = scores + heads * BLOCK_KEYS
            masses = tops + heads
            for i in range(heads * dim):
                scratch[query + i] = wide(q[at + i]) * scale
                scratch[summed + i] = np.float32(0)
            for head in range(heads):
                scratch[tops + head] = -np.float32(np.inf)
                scratch[masses + head] = np.float32(0)
            for start in range(0, length, BLOCK_KEYS):
                count = min(BLOCK_KEYS, length - start)
                for head in range(heads):
                    scratch[masses + heads + head] = scratch[tops + head]
                for key in range(count):
                    place = start + key
                    slot = np.int64(table[line + place // page]) * page + place % page
                    for head in range(mine):
                        k = (slot * kv_heads + first + head) * dim
                        for g in range(group):
                            each = head * group + g
                            total = np.float32(0)
                            for d in range(dim):
                                total += wide(keys[k + d]) * scratch[query + each * dim + d]
                            scratch[scores + each * BLOCK_KEYS + key] = total
                            if total > scratch[tops + each]:
                                scratch[tops + each] = total
                for each in range(heads):
                    top = scratch[tops + each]
                    shrunk = exponential(scratch[masses + heads + each] - top)
                    mass = np.float32(0)
                    for key in range(count):
                        weight = exponential(scratch[scores + each * BLOCK_KEYS + key] - top)
                        scratch[scores + each * BLOCK_KEYS + key] = weight
                        mass += weight
                    scratch[masses + each] = scratch[masses + each] * shrunk + mass
                    for d in range(dim):
                        scratch[summed + each * dim + d] *= shrunk
                for key in range(0, count - 3, 4):
                    place = start + key
                    a = np.int64(table[line + place // page]) * page + place % page
                    place += 1
                    b = np.int64(table[line + place // page]) * page + place % page
                    place += 1
                    c = np.int64(table[line + place // page]) * page + place % page
                    place += 1
                    e = np.int64(table[line + place // page]) * page + place % page
                    for head in range(mine):
                        va = (a * kv_heads + first + head) * dim
                        vb = (b * kv_heads + first + head) * dim
                        vc = (c * kv_heads + first + head) * dim
                        ve = (e * kv_heads + first + head) * dim
                        for g in range(group):
                            each = head * group + g
                            w = scores + each * BLOCK_KEYS + key
                            wa, wb, wc, we = (
                                scratch[w],
                                scratch[w + 1],
                                scratch[w + 2],
                                scratch[w + 3],
                            )
                            for d in range(dim):
                                scratch[summed + each * dim + d] += (
                                    wa * wide(values[va + d]) + wb * wide(values[vb + d])
                                ) + (wc * wide(values[vc + d]) + we * wide(values[ve + d]))
                for key in range(count - count % 4, count):
                    place = start + key
                    slot = np.int64(table[line + place // page]) * page + place % page
                    for head in range(mine):
                        v = (slot * kv_heads + first + head) * dim
                        for g in range(group):
                            each = head * group + g
                            weight = scratch[scores + each * BLOCK_KEYS + key]
                            for d in range(dim):
                                scratch[summed + each * dim + d] += weight * wide(values[v + d])
            for each in range(heads):
                share = np.float32(1) / scratch[masses + each]
                for d in range(dim):
                    out[at + each * dim + d] = narrow(scratch[summed + each * dim + d] * share)

    return Kernel(attend)
