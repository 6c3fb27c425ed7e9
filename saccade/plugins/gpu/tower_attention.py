"""The attention backends for vision encoders on GPUs, by name. Attention is bidirectional within
segments.

triton: Saccade's kernel. It can be captured in CUDA graphs.
flash: torch's kernel for 16 bits. It can be captured, too.
fa3: FlashAttention-3 (Hopper), which requires its package. NOT YET RUN.
fa4: FlashAttention-4, which requires its package. NOT YET RUN.
sdpa: PyTorch's, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional as F

from saccade.kernels.reference.segments import Segments, TowerAttention, sdpa_segments
from saccade.plugins.gpu.libraries.installed import load_fa3
from saccade.plugins.gpu.triton.segments import launch_segments


def _triton_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    assert len(k) == len(q)
    bounds = segments.bounds
    return launch_segments(q, k, v, bounds, bounds, segments.longest, scale)


def _flash_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Call torch's variable-length flash attention once (CUDA, 16 bits)."""
    bounds, longest = segments.bounds, segments.longest
    return _in_eights(
        lambda *qkv: torch.ops.aten._flash_attention_forward(
            *qkv, bounds, bounds, longest, longest, 0.0, False, False, scale=scale
        ),
        q,
        k,
        v,
    )


def _fa3_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    attend = load_fa3("flash_attn_varlen_func")
    bounds, longest = segments.bounds, segments.longest

    def launch(*qkv: torch.Tensor) -> Sequence[torch.Tensor]:
        found = attend(
            *qkv,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
        )
        # Versions before 2025 also returned the log-sum-exp of each row.
        return (found,) if isinstance(found, torch.Tensor) else found

    return _in_eights(launch, q, k, v)


def _fa4_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    bounds, longest = segments.bounds, segments.longest
    return _in_eights(
        lambda *qkv: flash_attn_varlen_func(
            *qkv,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
        ),
        q,
        k,
        v,
    )


def _in_eights(
    launch: Callable[..., Sequence[torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """Pad heads to a multiple of 8 values, as `launch` requires, and return its first result."""
    assert len(k) == len(q)
    dim = q.shape[-1]
    if missing := -dim % 8:
        q, k, v = (F.pad(each, (0, missing)) for each in (q, k, v))
    out, *_ = launch(q, k, v)
    return out[..., :dim]


TOWERS: Mapping[str, TowerAttention] = {
    "triton": _triton_segments,
    "flash": _flash_segments,
    "fa3": _fa3_segments,
    "fa4": _fa4_segments,
    "sdpa": sdpa_segments,
}
