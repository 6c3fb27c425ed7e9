"""Attention within segments (vision tower), by PyTorch. Owns what segments are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch.nn import functional as F

from saccade.kernels.reference import long_attention as blockwise
from saccade.kernels.x86 import attention as compiled


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of rows that attend to each other: rows [bounds[i], bounds[i + 1]).

    Each is at most `longest` long, and may be empty. A captured graph reads the bounds anew at
    every replay.
    """

    bounds: torch.Tensor  # [S + 1] int32, on the rows' device
    longest: int


def sdpa_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Attend within segments. Neighbours with equal length share a call, unless each is long.

    Where code is compiled for them, all are one call.
    """
    if len(k) > len(q):
        return _whole(q, k, v, scale)
    lengths = [end - start for start, end in pairwise(segments.bounds.tolist())]
    if compiled.takes(q):
        return compiled.attend(q, k, v, compiled.lay_out_segments(tuple(lengths)), scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length, equal in groupby(lengths):
        count = len(list(equal))
        if not length:
            continue
        rows = slice(start, start + count * length)
        start = rows.stop
        if blockwise.pays(q, length, length):
            for first in range(rows.start, rows.stop, length):
                one = slice(first, first + length)
                out[one] = _whole(q[one], k[one], v[one], scale)
            continue
        queries, keys, values = (
            x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)
        )  # [B, H, L, D]
        attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        out[rows].view(count, length, *q.shape[1:]).copy_(attended.transpose(1, 2))
    return out


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend with q [L, H, D] to all of k, v [K, H, D]."""
    if compiled.takes(q):
        return compiled.attend(q, k, v, compiled.lay_out_whole(len(q), len(k)), scale)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if blockwise.pays(q, len(q), len(k)):
        return blockwise.attend(q, keys, values, scale, causal=False)
    queries = q.transpose(0, 1).unsqueeze(0)
    attended = F.scaled_dot_product_attention(
        queries, keys.unsqueeze(0), values.unsqueeze(0), scale=scale
    )
    return attended.squeeze(0).transpose(0, 1)
