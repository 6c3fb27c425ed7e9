"""The operations between a decoder layer's matmuls, in plain PyTorch: normalize, rotate and cache
queries and keys; add a residual and normalize; apply a gate.

Backends fuse each of them into one kernel launch, or one loop over rows.
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
    """The RMS norm of queries and keys.

    weight: [Hq + Hkv, D], with query heads first.
    """

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
    """Normalize and rotate queries and keys, write keys and values to the cache, and return the
    queries.

    qkv: heads of queries, keys and values, [T, Hq + 2 Hkv, D]. They may be modified.
    out_slots: [T], the KV slots in the cache, which converts to its dtype.
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
    """Set `kept[places] = rows` in the dtype of `kept`. For FP8, values are divided by `scale`."""
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
    """Return `act(gate) * up` [T, I] from gate_up [T, 2 I], in which the gate's values are
    first.
    """
    left, right = gate_up.chunk(2, dim=-1)
    return activate(left, act) * right


def gate_heads(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return `x * sigmoid(gates)`, both [T, H, D]."""
    return x * torch.sigmoid(gates)
