"""Computes attention of decoding requests over KV pages on CPUs. Each key and value is read once,
in place, and converted to float32 in registers.

Imported only if used (`ops.X86Ops`).
"""

from __future__ import annotations

from functools import cache

import torch

from saccade.kernels.reference.paged import PagedCache, PagedRows
from saccade.plugins.cpu.attention_call import BLOCK_FIELDS
from saccade.plugins.cpu.kernel import Kernel, bits
from saccade.plugins.cpu.numba_call import BLOCK_KEYS


def decode_paged(
    q: torch.Tensor, cache: PagedCache, rows: PagedRows, scale: float
) -> torch.Tensor:  # [R, Hq, D]
    """Attend with q [R, Hq, D], one token per sequence, to the sequence's keys and values.

    Results are batch-invariant.
    """
    q = q.contiguous()  # gated attention interleaves queries with gates
    count, heads, dim = q.shape
    kv_heads = cache.keys.shape[1]
    tensors = (q, cache.keys, cache.values, rows.page_table, rows.lines, rows.kv_lengths)
    assert all(tensor.is_contiguous() for tensor in tensors)
    scratch = torch.empty(count * heads * (2 * dim + BLOCK_KEYS + 3))
    out = torch.empty_like(q)
    parts = _parts(count, kv_heads)
    _attend(dim, heads // kv_heads)(
        count * parts,
        # an estimate, since the sequences' lengths are not read here
        count * kv_heads * dim * BLOCK_KEYS,
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


def decode_blocks(rows: PagedRows) -> torch.Tensor:  # [R, BLOCK_FIELDS] int64
    """Return the same as `attention.paged_blocks`, for rows with one token each and any value of
    `group`.
    """
    count, width = len(rows.kv_lengths), rows.page_table.shape[1]
    blocks = torch.empty((count, len(BLOCK_FIELDS)), dtype=torch.int64)
    addresses = rows.lines.data_ptr(), rows.kv_lengths.data_ptr(), blocks.data_ptr()
    _decode_blocks()(count, blocks.numel(), *addresses, width)
    return blocks


def _parts(rows: int, kv_heads: int) -> int:
    """Return the number of parts into which each row's heads are split, so that all threads have
    work.
    """
    needed = -(-torch.get_num_threads() // rows)
    return min(
        (part for part in range(1, kv_heads + 1) if kv_heads % part == 0 and part >= needed),
        default=kv_heads,
    )


@cache
def _decode_blocks() -> Kernel:
    return Kernel("paged_code", "decode_blocks")


@cache
def _attend(dim: int, group: int) -> Kernel:
    return Kernel("paged_code", "attend", dim, group)
