"""What surrounds causal self-attention in a layer: projections, rotary embedding, queries and keys
normalised where asked. Knows nothing of the cache: `protocol.Attention` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from saccade.kernels.norm import rms_norm
from saccade.kernels.rotary import Rotation, rotate_
from saccade.nn.linear import Column, Linear, RowLinear
from saccade.nn.protocol import Attention
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads are counted over all ranks. `qk_norm_eps` None: queries and keys are not normalised."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm_eps: float | None


class CausalAttention:
    """Query, key and value are one multiplication; queries and keys are normalised and rotated
    together.
    """

    __slots__ = ("eps", "heads", "kv_heads", "layer", "out", "qk_weight", "qkv")

    def __init__(
        self, weights: Weights, name: str, shape: AttentionShape, shard: Shard, layer: int
    ) -> None:
        """`layer`: whose keys and values these are."""
        self.layer = layer
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.heads = shard.divide(shape.heads, "attention heads")
        sharing = shard.over(shape.kv_heads)
        self.kv_heads = sharing.divide(shape.kv_heads, "key/value heads")
        columns = [
            Column(f"{name}.q_proj", q, shard),
            Column(f"{name}.k_proj", kv, sharing),
            Column(f"{name}.v_proj", kv, sharing),
        ]
        self.qkv = Linear.columns(weights, columns, shape.hidden, bias=shape.qkv_bias)
        self.out = RowLinear(weights, f"{name}.o_proj", q, shape.hidden, shard, bias=False)
        self.eps = shape.qk_norm_eps or 0.0
        self.qk_weight = None
        if shape.qk_norm_eps is not None:
            head = (shape.head_dim,)
            each = [Part(f"{name}.q_norm.weight", head)] * self.heads + [
                Part(f"{name}.k_norm.weight", head)
            ] * self.kv_heads
            self.qk_weight = weights.load(*each).view(self.heads + self.kv_heads, shape.head_dim)

    def __call__(self, x: torch.Tensor, rotation: Rotation, attention: Attention) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]"""
        rotated = self.heads + self.kv_heads
        qkv = self.qkv(x).view(x.shape[0], rotated + self.kv_heads, -1)  # [T, Hq + 2 Hkv, D]
        qk = qkv[:, :rotated]
        if self.qk_weight is not None:
            qk = rms_norm(qk, self.qk_weight, self.eps)
        rotate_(rotation, qk)
        attended = attention(qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:], self.layer)
        return self.out(attended.flatten(1))
