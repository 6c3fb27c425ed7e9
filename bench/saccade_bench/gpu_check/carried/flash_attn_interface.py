"""FlashAttention-3's functions, which call the library in vLLM's wheel, `_vllm_fa3_C.abi3.so`. Both
files are unpacked with the packages that a GPU machine lacks (`gpu_check.plan`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

torch.ops.load_library(Path(__file__).with_name("_vllm_fa3_C.abi3.so"))


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor | None = None,
    lengths_k: torch.Tensor | None = None,
    max_q: int,
    max_k: int,
    pages: torch.Tensor | None = None,
    scale: float | None,
    causal: bool,
) -> torch.Tensor:
    """Call the library, which only has positional arguments, in the order of its schema."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    new_keys, rotary_and_scales, window = (None,) * 3, (None,) * 8, (-1, -1)
    keys = (starts_q, starts_k, None, None, lengths_k, max_q, max_k, pages)
    # softcap, interleaved, scheduler metadata, splits, packed heads, reserved multiprocessors, ...
    rest = (0.0, True, None, 0, None, 0, None, 1, 0, None)
    forward = torch.ops._vllm_fa3_C.fwd
    found: torch.Tensor = forward(
        q, k, v, *new_keys, out, *keys, *rotary_and_scales, scale, causal, *window, *rest
    )[0]
    return found


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    return _forward(
        q, k, v, starts_q=cu_seqlens_q, starts_k=cu_seqlens_k, max_q=max_seqlen_q,
        max_k=max_seqlen_k, scale=softmax_scale, causal=causal,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    return _forward(
        q, k_cache, v_cache, starts_q=cu_seqlens_q, lengths_k=cache_seqlens, max_q=max_seqlen_q,
        max_k=page_table.shape[1] * k_cache.shape[1], pages=page_table, scale=softmax_scale,
        causal=causal,
    )  # fmt: skip
