"""Attention: causal over the keys and values of sequences (language model), and bidirectional over
segments (vision tower).

Owns nothing; knows nothing of pages. No mask larger than `MASK_VALUES` is ever made, on a CPU none
at all; grouped queries share their keys without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import torch
from torch.nn import functional as F

from saccade.kernels import long_attention as blockwise

Backend = Literal["triton", "flash", "cudnn", "fa3", "fa4", "sdpa"]
"""Of attention within segments.

triton: our own kernel (CUDA), can be captured in a graph. flash: torch's (CUDA, 16 bits), can be
captured too. cudnn: cuDNN's (the same), which plans for half a second whenever a shape is new. fa3,
fa4: FlashAttention-3's (Hopper) and -4's (the same), where those packages are. sdpa: everywhere.
cudnn, fa3 and fa4 are NOT YET RUN.
"""

MASK_VALUES = 1 << 20
"""Query rows times keys of one masked block: bounds the memory of a prefill that has a cached
prefix.
"""
WIDE_GROUP = 3
"""Up to so many queries of a key head, a token that decodes costs a CPU less in float32, in blocks
of `WIDE_KEYS` keys, than PyTorch's products of 16 bits do (measured without AMX: LOG.md).
"""
WIDE_KEYS = 512
MERGING = ("cpu",)
"""Devices on which a cached prefix is attended to apart from the rest, without any mask."""


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:  # [L, Hq, D]
    """Causal (lower right) attention of q [L, Hq, D] to k, v [1, Hkv, K, D] of one sequence: its
    last L tokens to all K.
    """
    length, heads, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    if length == 1 and _widens(q, group):
        return _wide_attention(q.view(kv_heads, group, dim), k[0], v[0], scale).view(q.shape)
    if length == 1:
        # One query sees every key: the queries that share a key head become rows of one unmasked
        # problem.
        return F.scaled_dot_product_attention(
            q.view(1, kv_heads, group, dim), k, v, scale=scale
        ).reshape(1, heads, dim)
    if blockwise.pays(q, length * group, keys):
        return blockwise.attend(q, k[0], v[0], scale, causal=True)
    # The members of a group become the batch, over which keys and values are expanded without a
    # copy.
    queries = q.view(length, kv_heads, group, dim).permute(2, 1, 0, 3)  # [G, Hkv, L, D]
    k, v = k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1)
    if keys == length:
        out = F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale)
    elif q.device.type in MERGING:
        out = _merged(queries, k, v, scale)
    else:
        out = torch.cat(
            [_masked_block(queries, k, v, block, scale) for block in _blocks(length, keys)], dim=2
        )
    return out.permute(2, 1, 0, 3).reshape(length, heads, dim)


def _widens(q: torch.Tensor, group: int) -> bool:
    return (
        q.device.type == "cpu"
        and q.itemsize == 2
        and group <= WIDE_GROUP
        and not torch.cpu._is_amx_tile_supported()
    )


def _wide_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:  # [Hkv, G, D]
    """Attention of q [Hkv, G, D], queries of one token, to all of k, v [Hkv, K, D], in float32."""
    wide = q.float() * scale
    if k.shape[1] <= WIDE_KEYS:
        weights = torch.bmm(wide, k.float().transpose(1, 2)).softmax(-1)
        return torch.bmm(weights, v.float()).to(q.dtype)
    scores = [torch.bmm(wide, keys.float().transpose(1, 2)) for keys in k.split(WIDE_KEYS, 1)]
    weights = torch.cat(scores, 2).softmax(-1)
    out = torch.zeros_like(wide)
    for some, values in zip(weights.split(WIDE_KEYS, 2), v.split(WIDE_KEYS, 1)):
        out.baddbmm_(some, values.float())
    return out.to(q.dtype)


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:  # [R, Hq, D]
    """Attention of q [R, Hq, D], one query per sequence, to k, v [R, Hkv, K, D], in one call.

    mask [R, K]: added to the scores; -inf where a sequence has no such key.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    # The queries that share a key head become rows of one problem.
    queries = q.view(rows, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(queries, k, v, mask[:, None, None], scale=scale)
    return out.reshape(rows, heads, dim)


def _merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of q [G, Hkv, L, D] in two parts: to the prefix, which every row sees whole,
    and among the rows themselves.

    Each part's softmax has its own denominator; their logs say how to weigh the two (Milakov &
    Gimelshein 2018, online softmax).
    """
    prefix = k.shape[2] - q.shape[2]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    before, log_before = flash(q, k[:, :, :prefix], v[:, :, :prefix], 0.0, False, scale=scale)
    among, log_among = flash(q, k[:, :, prefix:], v[:, :, prefix:], 0.0, True, scale=scale)
    share = torch.sigmoid(log_before - log_among).unsqueeze(-1)  # [G, Hkv, L, 1] float32
    return torch.lerp(among.float(), before.float(), share).to(q.dtype)


def _blocks(length: int, keys: int) -> list[range]:
    size = max(1, MASK_VALUES // keys)
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def _masked_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: range, scale: float
) -> torch.Tensor:
    """Rows `block` of q [G, Hkv, L, D] against the keys that the last of them may see."""
    prefix = k.shape[2] - q.shape[2]
    seen = prefix + block.stop
    mask = torch.ones(len(block), seen, dtype=torch.bool, device=q.device).tril(
        prefix + block.start
    )
    rows = q[:, :, block.start : block.stop]
    return F.scaled_dot_product_attention(
        rows, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale
    )


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of rows that attend to each other: rows [bounds[i], bounds[i + 1]), of which none is
    longer than `longest`.

    Runs may be empty. What was captured in a graph reads the bounds anew at every replay.
    """

    bounds: torch.Tensor  # [S + 1] int32, on the rows' device
    longest: int


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    scale: float,
    backend: Backend,
) -> torch.Tensor:  # [T, H, D]
    """Bidirectional attention of q, k, v [T, H, D]: the rows of a segment see each other and
    nothing else.

    Where k and v have more rows than q, all are of one segment.
    """
    return BACKENDS[backend](q, k, v, segments, scale)


def _triton_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    # Imported where there is a GPU: elsewhere Triton need not be installed.
    from saccade.kernels.triton.segments import launch_segments

    assert len(k) == len(q)
    bounds = segments.bounds
    return launch_segments(q, k, v, bounds, bounds, segments.longest, scale)


def _flash_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """One launch of torch's variable-length flash attention (CUDA, 16 bits)."""
    bounds, longest = segments.bounds, segments.longest
    return _in_eights(
        lambda *qkv: torch.ops.aten._flash_attention_forward(
            *qkv, bounds, bounds, longest, longest, 0.0, False, False, scale=scale
        ),
        q,
        k,
        v,
    )


def _cudnn_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """As `_flash_segments`, by cuDNN."""
    bounds, longest = segments.bounds, segments.longest
    return _in_eights(
        lambda *qkv: torch.ops.aten._cudnn_attention_forward(
            *qkv, None, bounds, bounds, longest, longest, False, 0.0, False, False, scale=scale
        ),
        q,
        k,
        v,
    )


def _fa3_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """As `_flash_segments`, by FlashAttention-3."""
    from flash_attn_interface import flash_attn_varlen_func

    bounds, longest = segments.bounds, segments.longest

    def launch(*qkv: torch.Tensor) -> Sequence[torch.Tensor]:
        found = flash_attn_varlen_func(*qkv, bounds, bounds, longest, longest, softmax_scale=scale)
        # Until 2025 it gave a row's denominators, too.
        return (found,) if isinstance(found, torch.Tensor) else found

    return _in_eights(launch, q, k, v)


def _fa4_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """As `_flash_segments`, by the package flash-attn-4."""
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
    """The first result of a launch that takes head sizes that are multiples of 8."""
    assert len(k) == len(q)
    dim = q.shape[-1]
    if missing := -dim % 8:
        q, k, v = (F.pad(each, (0, missing)) for each in (q, k, v))
    out, *_ = launch(q, k, v)
    return out[..., :dim]


def _sdpa_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Neighbouring segments of equal length are one batched call, unless each is long."""
    if len(k) > len(q):
        return _whole(q, k, v, scale)
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
                out[one] = _whole(q[one], k[one], v[one], scale)
            continue
        queries, keys, values = (
            x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)
        )  # [B, H, L, D]
        attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        out[rows].view(count, length, *q.shape[1:]).copy_(attended.transpose(1, 2))
    return out


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of q [L, H, D] to all of k, v [K, H, D]."""
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if blockwise.pays(q, len(q), len(k)):
        return blockwise.attend(q, keys, values, scale, causal=False)
    queries = q.transpose(0, 1).unsqueeze(0)
    attended = F.scaled_dot_product_attention(
        queries, keys.unsqueeze(0), values.unsqueeze(0), scale=scale
    )
    return attended.squeeze(0).transpose(0, 1)


BACKENDS: dict[Backend, Callable[..., torch.Tensor]] = {
    "triton": _triton_segments,
    "flash": _flash_segments,
    "cudnn": _cudnn_segments,
    "fa3": _fa3_segments,
    "fa4": _fa4_segments,
    "sdpa": _sdpa_segments,
}
