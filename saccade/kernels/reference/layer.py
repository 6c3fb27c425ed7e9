"""The operations between the matmuls of a language model's layer, each in one pass: queries and
keys normalised, rotated and cached; a residual added and normalised; a gate applied.

Owns what each means in plain PyTorch. Backends have each as one launch, or one loop over rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from saccade.kernels.matrix import FP8
from saccade.kernels.reference.activation import Activation, activate
from saccade.kernels.reference.norm import layer_norm, rms_norm
from saccade.kernels.reference.paged import PagedCache
from saccade.kernels.reference.rotary import Rotation, rotate_


class QKNorm(NamedTuple):
    """RMS norm for queries and keys: weights [Hq + Hkv, D], query heads first, then keys."""

    weight: torch.Tensor
    eps: float


def rope_and_cache(
    qkv: torch.Tensor,
    kv_heads: int,
    rotation: Rotation,
    qk_norm: QKNorm | None,
    cache: PagedCache,
    out_slots: torch.Tensor,
) -> torch.Tensor:  # [T, Hq, D]
    """Return queries ready for attention, and cache keys and values.

    Keys and values go to kv slots `out_slots` [T] in the cache, in its dtype. qkv [T, Hq + 2 Hkv,
    D]: heads for queries, keys and values; it may be changed. Queries and keys are normalised
    before they are turned.
    """
    rotated = qkv.shape[1] - kv_heads
    heads = rotated - kv_heads
    qk = qkv[:, :rotated]
    if qk_norm is not None:
        qk = rms_norm(qk, *qk_norm)
    rotate_(rotation, qk)
    put_rows(cache.keys, out_slots, qk[:, heads:], cache.key_scale)
    put_rows(cache.values, out_slots, qkv[:, rotated:], cache.value_scale)
    return qk[:, :heads]


def put_rows(kept: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    """Set `kept[places] = rows`, in `kept`'s dtype. FP8 values are divided by `scale`."""
    if kept.dtype == FP8:
        from saccade.kernels.reference.fp8 import to_fp8

        kept.view(torch.uint8).index_copy_(0, places, to_fp8(rows, scale).view(torch.uint8))
    else:
        kept.index_copy_(0, places, rows)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x + delta` and its RMS norm, both [T, hidden]."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def add_layer_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x + delta` and its layer norm, both [T, hidden]."""
    total = x + delta
    return total, layer_norm(total, weight, bias, eps)


def gate(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    """Return `act(gate) * up` [T, I] from gate_up [T, 2 I]: the gate's values, then up's."""
    left, right = gate_up.chunk(2, dim=-1)
    return activate(left, act) * right


def gate_heads(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return `x * sigmoid(gates)`, both [T, H, D]."""
    return x * torch.sigmoid(gates)
