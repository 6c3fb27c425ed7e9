"""The matrices of causal self-attention. `runtime/attention.py` computes the attention itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from saccade.kernels.matrix import Rows
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.linear import Column, Linear, RowLinear
from saccade.nn.protocol import Attention
from saccade.nn.shapes import TextConfig
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """The sizes of attention heads, over all ranks."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm_eps: float | None  # `None`: queries and keys are not normalized
    # The norm's weights are stored as `RMSNorm` documents, and queries are scaled by query_factor.
    around_one: bool = False
    query_factor: float = 1.0

    @classmethod
    def of(cls, config: TextConfig) -> HeadsConfig:
        """Return the sizes for a language model whose layers are all alike."""
        return cls(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            qk_norm_eps=config.rms_eps if config.qk_norm else None,
        )


class CausalAttention:
    """Self-attention with its projections. Queries, keys and values share one matrix."""

    __slots__ = ("group", "heads", "kv_heads", "layer", "out", "qk_norm", "qkv")

    def __init__(
        self, weights: Weights, name: str, shape: HeadsConfig, shard: Shard, layer: int
    ) -> None:
        """Load one layer's projections.

        layer: the index of the layer in the KV cache.
        """
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
        self.group = self.qkv.group
        self.out = RowLinear(weights, f"{name}.o_proj", q, shape.hidden, shard, bias=False)
        self.qk_norm: QKNorm | None = None
        if shape.qk_norm_eps is not None:
            head = (shape.head_dim,)
            each = [Part(f"{name}.q_norm.weight", head)] * self.heads + [
                Part(f"{name}.k_norm.weight", head)
            ] * self.kv_heads
            weight = weights.load(*each).view(self.heads + self.kv_heads, shape.head_dim)
            if shape.around_one:
                weight = weight.float() + 1.0
                weight[: self.heads] *= shape.query_factor
            self.qk_norm = QKNorm(weight, shape.qk_norm_eps)

    def __call__(self, x: Rows, rotation: Rotation, attention: Attention) -> torch.Tensor:
        """Return the layer's attention for x [T, hidden], [T, hidden]."""
        qkv = self.qkv(x).unflatten(1, (self.heads + 2 * self.kv_heads, -1))
        attended = attention(qkv, rotation, self.qk_norm, self.layer)
        return self.out(attended.flatten(1))
