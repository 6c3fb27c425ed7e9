"""Attention within segments, for vision encoders, computed with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch.nn import functional as F

from saccade.kernels.reference import long_attention as blockwise


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of rows that attend to each other: rows [bounds[i], bounds[i + 1]).

    A segment has at most `longest` rows, and may be empty. Captured graphs read the bounds at each
    replay.
    """

    bounds: torch.Tensor  # [S + 1] int32, on the rows' device
    longest: int


TowerAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments, float], torch.Tensor]
"""Bidirectional attention with q, k, v [T, H, D] and a scale, where rows attend only within their
segment. If k and v have more rows than q, there is only one segment. Returns [T, H, D].
"""


def sdpa_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    scale: float,
    softmax: blockwise.Softmax = blockwise.softmax,
) -> torch.Tensor:
    """Return the attention within segments. Implements `TowerAttention`.

    Adjacent segments of equal length share a call, unless they are long.

    softmax: the function to use if there are many keys.
    """
    if len(k) > len(q):
        return _whole(q, k, v, scale, softmax)
    lengths = [end - start for start, end in pairwise(segments.bounds.tolist())]
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
                out[one] = _whole(q[one], k[one], v[one], scale, softmax)
            continue
        queries, keys, values = (
            x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)
        )  # [B, H, L, D]
        attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        out[rows].view(count, length, *q.shape[1:]).copy_(attended.transpose(1, 2))
    return out


def _whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softmax: blockwise.Softmax
) -> torch.Tensor:
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if blockwise.pays(q, len(q), len(k)):
        return blockwise.attend(q, keys, values, scale, causal=False, softmax=softmax)
    queries = q.transpose(0, 1).unsqueeze(0)
    attended = F.scaled_dot_product_attention(
        queries, keys.unsqueeze(0), values.unsqueeze(0), scale=scale
    )
    return attended.squeeze(0).transpose(0, 1)
