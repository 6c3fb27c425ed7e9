"""Attention with many queries on CPUs that multiply 16-bit numbers but lack AMX: a block of queries
at a time, by oneDNN's products.

PyTorch's own attention packs its operands anew for each small tile on such CPUs, and takes 1.7 to
2.8 times as long (decision 006). Scores and softmax are in float32 here as there: products of
16-bit numbers are summed, and kept, in float32. Stateless; unaware of pages and segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from saccade.kernels.processor import has_bf16

Softmax = Callable[[torch.Tensor], torch.Tensor]
"""Of scores float32 [R, K], which it may overwrite, to weights in bfloat16."""

MIN_QUERIES = 64
"""Rows of a key head's products below which PyTorch's attention is as fast."""
MIN_KEYS = 256
BLOCK_SCORES = 1 << 19
"""Scores of a block: 2 MiB in float32, a part of a core's share of the last cache."""
BLOCK_QUERIES = (32, 256)
"""Rows of a block's products, at least and at most."""


def pays(q: torch.Tensor, queries: int, keys: int) -> bool:
    """Return True if `attend` is faster here, for so many keys, and queries that share a key head.

    q: a tensor like the queries.
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
    """Implement `Softmax` by PyTorch."""
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
    """Attend with q [L, Hq, D] to k, v [Hkv, K, D].

    causal: the queries are the last L of K tokens, and see themselves and those before them;
    otherwise all see all.
    """
    length, heads, dim = q.shape
    kv_heads, keys, _ = k.shape
    group = heads // kv_heads
    least, most = (max(1, rows // group) for rows in BLOCK_QUERIES)
    block = min(most, max(least, BLOCK_SCORES // (keys * group)))
    later = torch.ones(block, block, dtype=torch.bool).triu(1).unsqueeze(1) if causal else None
    out = torch.empty_like(q)
    with _products_of_16_bits():
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
def _products_of_16_bits() -> Iterator[None]:
    """Round only the operands of float32 matmuls to bfloat16.

    The operands are 16-bit numbers already, except for the scaled queries. The setting is the
    process's, whose products a worker makes in one thread.
    """
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before
