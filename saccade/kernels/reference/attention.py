"""Causal attention over contiguous keys and values on a CPU, computed with PyTorch.

Only sliding windows and bidirectional images need masks. Grouped queries share their keys without
copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from saccade.kernels.reference import long_attention as blockwise

MASKED_QUERIES = 256
"""Queries per mask, to limit the memory for a step's masks."""


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softmax: blockwise.Softmax = blockwise.softmax,
) -> torch.Tensor:  # [L, Hq, D]
    """Return the causal attention (lower right) of q [L, Hq, D] to one sequence's k, v [1, Hkv, K,
    D].

    The queries belong to the last L of K tokens.

    softmax: the function to use if there are many queries and keys.
    """
    length, heads, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    if length == 1:
        # A single query attends to all keys, so the queries of a group become rows of one unmasked
        # problem.
        return F.scaled_dot_product_attention(
            q.view(1, kv_heads, group, dim), k, v, scale=scale
        ).reshape(1, heads, dim)
    if blockwise.pays(q, length * group, keys):
        return blockwise.attend(q, k[0], v[0], scale, causal=True, softmax=softmax)
    # The queries of a group become the batch, over which keys and values are expanded without
    # copies.
    queries = q.view(length, kv_heads, group, dim).permute(2, 1, 0, 3)  # [G, Hkv, L, D]
    k, v = k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1)
    if keys == length:
        out = F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale)
    else:
        out = _merged(queries, k, v, scale)
    return out.permute(2, 1, 0, 3).reshape(length, heads, dim)


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:  # [R, Hq, D]
    """Return the attention of q [R, Hq, D], one query per sequence, to k, v [R, Hkv, K, D].

    mask: [R, K], added to the scores. It is -inf for keys that a sequence does not have.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    # The queries of a group become rows of one problem.
    queries = q.view(rows, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(queries, k, v, mask[:, None, None], scale=scale)
    return out.reshape(rows, heads, dim)


class Block(NamedTuple):
    """Consecutive queries of a row, and the range of keys that at least one of them attends to.

    seen: which queries attend to which keys, [B, K] bool, or None if all attend to all.
    """

    queries: slice
    keys: slice
    seen: torch.Tensor | None


def blocks_of(first: torch.Tensor, end: torch.Tensor) -> list[Block]:
    """Split the queries of a row into blocks. Query t attends to keys [first[t], end[t])."""
    found = []
    for start in range(0, len(first), MASKED_QUERIES):
        queries = slice(start, min(start + MASKED_QUERIES, len(first)))
        low, high = int(first[queries].min()), int(end[queries].max())
        at = torch.arange(low, high)
        seen = (at >= first[queries, None]) & (at < end[queries, None])
        found.append(Block(queries, slice(low, high), None if seen.all() else seen))
    return found


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], scale: float
) -> torch.Tensor:  # [L, Hq, D]
    """Return the attention of q [L, Hq, D] to k, v [1, Hkv, K, D], computed block by block."""
    _, heads, dim = q.shape
    kv_heads = k.shape[1]
    group, out = heads // kv_heads, torch.empty_like(q)
    for rows, keys, seen in blocks:
        if len(q) == 1:
            return causal_attention(q, k[:, :, keys], v[:, :, keys], scale)
        queries = q[rows].view(-1, kv_heads, group, dim).permute(2, 1, 0, 3)  # [G, Hkv, B, D]
        keys_seen = k[:, :, keys].expand(group, -1, -1, -1)
        values = v[:, :, keys].expand(group, -1, -1, -1)
        attended = F.scaled_dot_product_attention(queries, keys_seen, values, seen, scale=scale)
        out[rows] = attended.permute(2, 1, 0, 3).reshape(-1, heads, dim)
    return out


def _merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the causal attention of q [G, Hkv, L, D], computed in two parts that are merged.

    All queries attend to the first part, the prefix. The other part is causal. The logarithms of
    the softmax denominators determine the weights of the parts (online softmax, Milakov &
    Gimelshein 2018).
    """
    prefix = k.shape[2] - q.shape[2]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    before, log_before = flash(q, k[:, :, :prefix], v[:, :, :prefix], 0.0, False, scale=scale)
    among, log_among = flash(q, k[:, :, prefix:], v[:, :, prefix:], 0.0, True, scale=scale)
    share = torch.sigmoid(log_before - log_among).unsqueeze(-1)  # [G, Hkv, L, 1] float32
    return torch.lerp(among.float(), before.float(), share).to(q.dtype)
