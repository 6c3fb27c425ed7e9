"""Attention with many queries on CPUs with bfloat16 matmuls but without AMX. oneDNN's matmuls
compute a block of queries at a time.

On such CPUs PyTorch's attention repacks its operands for each small tile, and takes 1.7 to 2.8
times as long (decision 006). As in PyTorch, scores and softmax are in float32: matmuls of 16-bit
values accumulate in float32, and return it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from saccade.kernels.processor import has_bf16

Softmax = Callable[[torch.Tensor], torch.Tensor]
"""Maps scores float32 [R, K], which it may overwrite, to weights in bfloat16."""

MIN_QUERIES = 64
"""With fewer queries per key head, PyTorch's attention is as fast."""
MIN_KEYS = 256
BLOCK_SCORES = 1 << 19
"""Scores per block: 2 MiB in float32, less than a core's share of the last-level cache."""
BLOCK_QUERIES = (32, 256)
"""Minimum and maximum queries per block, over the heads that share a key head."""


def pays(q: torch.Tensor, queries: int, keys: int) -> bool:
    """Return True if `attend` is faster on this CPU than PyTorch's attention.

    q: a tensor with the dtype and device of the queries.
    queries: the number of queries that share a key head.
    keys: the number of keys.
    """
    return (
        q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and queries >= MIN_QUERIES
        and keys >= MIN_KEYS
        and has_bf16()
        and not torch.cpu._is_amx_tile_supported()
    )


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax of scores, as bfloat16. The scores are overwritten."""
    return torch.softmax(scores, -1, out=scores).bfloat16()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    softmax: Softmax = softmax,
) -> torch.Tensor:  # [L, Hq, D]
    """Return the attention of q [L, Hq, D] to k, v [Hkv, K, D].

    causal: True if the queries belong to the last L of K tokens, and attend to keys up to their
        own. Otherwise, all attend to all keys.
    """
    length, heads, dim = q.shape
    kv_heads, keys, _ = k.shape
    group = heads // kv_heads
    least, most = (max(1, rows // group) for rows in BLOCK_QUERIES)
    block = min(most, max(least, BLOCK_SCORES // (keys * group)))
    later = torch.ones(block, block, dtype=torch.bool).triu(1).unsqueeze(1) if causal else None
    out = torch.empty_like(q)
    with _bfloat16_matmuls():
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            turned = k[head].float().t().contiguous()  # [D, K]
            queries = q[:, mine].float() * scale  # [L, G, D]
            for start in range(0, length, block):
                end = min(start + block, length)
                seen = keys - length + end if causal else keys
                scores = torch.mm(queries[start:end].reshape(-1, dim), turned[:, :seen])
                if later is not None:
                    own = scores.view(end - start, group, seen)[:, :, start - end :]
                    own.masked_fill_(later[: end - start, :, : end - start], -torch.inf)
                weights = softmax(scores)
                out[start:end, mine] = (weights @ v[head, :seen]).view(-1, group, dim)
    return out


@contextmanager
def _bfloat16_matmuls() -> Iterator[None]:
    """Round the operands of float32 matmuls to bfloat16 until the context exits.

    Except for the scaled queries, the operands are 16-bit values already. This is a setting of the
    process, in which only one thread runs matmuls.
    """
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before
