"""Multi-head latent attention (MLA).

For each token, the cache stores one short row (the latents), from which each head's keys and values
are computed, and one key with RoPE that all heads share.

Cached latents are not expanded to keys and values. Instead, the key projection is applied to the
queries, and the value projection to the output of attention. All query heads then share one KV head
of latents.
"""

from __future__ import annotations

import torch

from saccade.kernels.matrix import Rows
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.linear import Column, Linear, RowLinear
from saccade.nn.norm import RMSNorm
from saccade.nn.protocol import Attention
from saccade.nn.shapes import LatentConfig
from saccade.nn.weights import Weights
from saccade.parallel import UNSHARDED, Shard


class LatentAttention:
    """Latent attention whose heads are sharded over the ranks. Every rank has all latents.

    Implements `nn.decoder.Mixer`.
    """

    __slots__ = ("down", "group", "heads", "keys", "latent_norm", "layer", "ops", "out", "queries",
                 "query_norm", "shape", "values")  # fmt: skip

    def __init__(
        self,
        weights: Weights,
        name: str,
        sizes: tuple[int, int],
        shape: LatentConfig,
        shard: Shard,
        layer: int,
    ) -> None:
        """Load the projections of one layer.

        sizes: the hidden size, and the number of heads over all ranks.
        layer: the layer's index in the KV cache.
        """
        hidden, heads = sizes
        self.layer, self.shape, self.ops = layer, shape, weights.ops
        self.heads = shard.divide(heads, "attention heads")
        made = heads * (shape.plain + shape.rotated)
        latents = Column(f"{name}.kv_a_proj_with_mqa", shape.width, UNSHARDED)
        self.query_norm: RMSNorm | None = None
        self.queries: Linear | None = None
        if shape.query_latent is None:
            first = Column(f"{name}.q_proj", made, shard)
        else:
            first = Column(f"{name}.q_a_proj", shape.query_latent, UNSHARDED)
            self.query_norm = RMSNorm(
                weights, f"{name}.q_a_layernorm", shape.query_latent, shape.eps
            )
            column = Column(f"{name}.q_b_proj", made, shard)
            self.queries = Linear.columns(weights, [column], shape.query_latent, bias=False)
        # Queries (or their latents) and the cached latents are computed by one matrix.
        self.down = Linear.columns(weights, [first, latents], hidden, bias=False)
        self.group = self.down.group
        self.latent_norm = RMSNorm(weights, f"{name}.kv_a_layernorm", shape.latent, shape.eps)
        each = shape.plain + shape.values
        column = Column(f"{name}.kv_b_proj", heads * each, shard)
        both = weights.load(column.part("weight", shape.latent)).view(self.heads, each, -1)
        keys, values = both.split((shape.plain, shape.values), dim=1)
        self.keys = keys.contiguous()  # [H, plain, latent]
        self.values = values.transpose(1, 2).contiguous()  # [H, latent, values]
        self.out = RowLinear(
            weights, f"{name}.o_proj", heads * shape.values, hidden, shard, bias=False
        )

    def __call__(self, x: Rows, rotation: Rotation, attention: Attention) -> torch.Tensor:
        """Map x [T, hidden] -> [T, hidden]."""
        shape = self.shape
        made = self.down(x)
        first, latents = made.split((made.shape[1] - shape.width, shape.width), dim=1)
        if self.queries is not None and self.query_norm is not None:
            first = self.queries(self.query_norm(first.contiguous()))
        heads = first.unflatten(1, (self.heads, -1))  # [T, H, plain + rotated]
        plain, rotated = heads.split((shape.plain, shape.rotated), dim=2)
        low, shared = latents.split((shape.latent, shape.rotated), dim=1)
        both = torch.cat((rotated, shared.unsqueeze(1)), dim=1)  # [T, H + 1, rotated]
        self.ops.rotate_(rotation, both)
        queries = torch.bmm(plain.transpose(0, 1), self.keys).transpose(0, 1)
        queries = torch.cat((queries, both[:, :-1]), dim=2).mul_(shape.query_factor)
        kept = torch.cat((self.latent_norm(low.contiguous()), both[:, -1]), dim=1)
        seen = attention.over_latents(queries, kept, self.layer)[..., : shape.latent]
        values = torch.bmm(seen.transpose(0, 1), self.values)  # [H, T, values]
        return self.out(values.transpose(0, 1).flatten(1))
