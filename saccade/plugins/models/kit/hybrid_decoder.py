"""The language model of Qwen3.5 and MiniCPM-V 4.6. Its layers use the gated delta rule, or
attention with an output gate. An MLP, or experts and a shared expert, follow each of them. Families
read its shape from checkpoints (`hybrid_text.py`).

Norms store their weights minus 1. Rotary tables are computed once per forward pass and shared by
all attention layers.
"""

from __future__ import annotations

import torch

from saccade.kernels.matrix import DenseMatrix, Rows
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.decoder import Decoder, DecoderLayer, MultiRope, layer_name
from saccade.nn.linear import Linear, RowLinear, share
from saccade.nn.mlp import GatedMLP
from saccade.nn.moe import MoEShape, SparseMLP
from saccade.nn.norm import RMSNorm
from saccade.nn.protocol import Attention, DeltaInputs
from saccade.nn.shapes import ExpertsConfig, TextConfig
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.kit.hybrid_config import DeltaConfig, HybridConfig


class GatedAttention:
    """Causal self-attention whose outputs are multiplied by the sigmoid of a gate.

    The checkpoint interleaves queries and gates by head. After loading, one matrix computes all
    queries, then keys, values and gates.
    """

    __slots__ = ("group", "heads", "kv_heads", "layer", "ops", "out", "qk_norm", "wide")

    def __init__(
        self, weights: Weights, name: str, config: TextConfig, shard: Shard, layer: int
    ) -> None:
        self.layer = layer
        self.ops = weights.ops
        dim, hidden = config.head_dim, config.hidden
        self.heads = shard.divide(config.heads, "attention heads")
        sharing = shard.over(config.kv_heads)
        self.kv_heads = sharing.divide(config.kv_heads, "key/value heads")
        shape = (2 * config.heads * dim, hidden)
        queries, gates = (
            [
                Part(f"{name}.q_proj.weight", shape, (slice(at * dim, (at + 1) * dim),))
                for at in range(2 * shard.rank * self.heads + half, 2 * config.heads, 2)
            ][: self.heads]
            for half in (0, 1)
        )
        kv = config.kv_heads * dim
        mine = share(sharing, 0, kv, f"outputs of {name}")
        keys, values = (
            Part(f"{name}.{each}.weight", (kv, hidden), (mine,)) for each in ("k_proj", "v_proj")
        )
        parts = [*queries, keys, values, *gates]
        added = weights.adapters.product(parts)
        self.wide = Linear(weights.ops, weights.load_matrix(*parts), low_rank=added)
        self.group = self.wide.group
        self.out = RowLinear(
            weights, f"{name}.o_proj", config.heads * dim, hidden, shard, bias=False
        )
        q_norm, k_norm = (
            RMSNorm(weights, f"{name}.{each}", dim, config.rms_eps, around_one=True).weight
            for each in ("q_norm", "k_norm")
        )
        weight = torch.stack([q_norm] * self.heads + [k_norm] * self.kv_heads)
        self.qk_norm = QKNorm(weight, config.rms_eps)

    def __call__(self, x: Rows, rotation: Rotation, attention: Attention) -> torch.Tensor:
        """Map x [T, hidden] -> [T, hidden]."""
        wide = self.wide(x).unflatten(1, (2 * (self.heads + self.kv_heads), -1))
        qkv, gates = wide.split((self.heads + 2 * self.kv_heads, self.heads), dim=1)
        attended = attention(qkv, rotation, self.qk_norm, self.layer)
        return self.out(self.ops.gate_heads(attended, gates).flatten(1))


class GatedDelta:
    """Linear attention by the gated delta rule. Its output is normalized and gated."""

    __slots__ = (
        "bias",
        "eps",
        "gate_width",
        "layer",
        "norm",
        "ops",
        "out",
        "rate",
        "taps",
        "thin",
        "thin_added",
        "wide",
    )

    group = 0  # `thin` needs unquantized rows

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: TextConfig,
        delta: DeltaConfig,
        shard: Shard,
        layer: int,
    ) -> None:
        self.layer = layer
        self.ops = weights.ops
        self.eps = config.rms_eps
        self.gate_width = shard.divide(delta.values, "linear attention values")
        cuts = _cuts(delta, shard)
        rows = (2 * delta.keys + delta.values, config.hidden)
        gates = share(shard, 0, delta.values, "gates")
        parts = [
            *(Part(f"{name}.in_proj_qkv.weight", rows, (cut,)) for cut in cuts),
            Part(f"{name}.in_proj_z.weight", (delta.values, config.hidden), (gates,)),
        ]
        added = weights.adapters.product(parts)
        self.wide = Linear(weights.ops, weights.load_matrix(*parts), low_rank=added)
        heads = share(shard, 0, delta.value_heads, "linear attention value heads")
        thin = (delta.value_heads, config.hidden)
        # Never quantized: there are few rows, and their outputs are exponentiated.
        few = [Part(f"{name}.in_proj_{each}.weight", thin, (heads,)) for each in "ba"]
        self.thin = DenseMatrix(weights.load(*few)).ready(self.ops)
        self.thin_added = weights.adapters.product(few)
        kernel = (rows[0], 1, delta.taps)
        taps = weights.load(*(Part(f"{name}.conv1d.weight", kernel, (cut,)) for cut in cuts))
        self.taps = taps.squeeze(1).t().contiguous()  # [K, C]
        rates, self.bias = (
            weights.load(Part(f"{name}.{each}", (delta.value_heads,), (heads,))).float()
            for each in ("A_log", "dt_bias")
        )
        self.rate = -rates.exp()
        self.norm = weights.load(Part(f"{name}.norm.weight", (delta.value_dim,)))
        self.out = RowLinear(
            weights, f"{name}.out_proj", delta.values, config.hidden, shard, bias=False
        )

    def __call__(self, x: Rows, _: Rotation, attention: Attention) -> torch.Tensor:
        """Map x [T, hidden] -> [T, hidden], independent of positions."""
        assert isinstance(x, torch.Tensor)
        wide = self.wide(x)
        mixed, gate = wide.split((wide.shape[1] - self.gate_width, self.gate_width), dim=1)
        both = self.thin.multiply(self.ops, x)
        if (present := self.thin_added.active.now) is not None:
            both = self.thin_added.add_to_product(self.ops, x, both, present)
        decay, beta = self.ops.delta_gates(both, self.bias, self.rate)
        read = attention.recurrence(DeltaInputs(mixed, self.taps, decay, beta), self.layer)
        gated = self.ops.gated_rms_norm(read, gate.view(read.shape), self.norm, self.eps)
        return self.out(gated.flatten(1))


def _cuts(delta: DeltaConfig, shard: Shard) -> tuple[slice, slice, slice]:
    return (
        share(shard, 0, delta.keys, "linear attention queries"),
        share(shard, delta.keys, delta.keys, "linear attention keys"),
        share(shard, 2 * delta.keys, delta.values, "linear attention values"),
    )


class SharedSparseMLP:
    """Routed experts, and a shared expert that processes all rows and is weighted by a gate."""

    __slots__ = ("gate", "ops", "shared", "sparse")

    group = 0  # router and gate need unquantized rows

    def __init__(
        self,
        weights: Weights,
        name: str,
        hidden: int,
        experts: ExpertsConfig,
        shared: int,
        shard: Shard,
    ) -> None:
        shape = MoEShape(
            hidden, experts.width, experts.count, experts.top, "silu", outputs_first=True
        )
        self.sparse = SparseMLP(weights, name, shape, shard)
        self.shared = GatedMLP(
            weights, f"{name}.shared_expert", (hidden, shared), "silu", shard, bias=False
        )
        self.ops = weights.ops
        gate = weights.load(Part(f"{name}.shared_expert_gate.weight", (1, hidden)))
        self.gate = DenseMatrix(gate).ready(self.ops)

    def __call__(self, x: Rows) -> torch.Tensor:
        """Map [T, hidden] -> [T, hidden]."""
        assert isinstance(x, torch.Tensor)
        share = torch.sigmoid(self.gate.multiply(self.ops, x))
        return share * self.shared(x) + self.sparse(x)


def hybrid_layer(
    weights: Weights,
    layer: int,
    config: TextConfig,
    hybrid: HybridConfig,
    shard: Shard,
    name: str = "",
) -> DecoderLayer[GatedAttention | GatedDelta]:
    """Build one layer.

    name: the name of a layer outside of the language model (in an MTP head), which has full
    attention.
    """

    def mixer(name: str) -> GatedAttention | GatedDelta:
        if layer >= config.layers or hybrid.full[layer]:
            return GatedAttention(weights, f"{name}.self_attn", config, shard, layer)
        return GatedDelta(weights, f"{name}.linear_attn", config, hybrid.delta, shard, layer)

    def mlp(name: str) -> GatedMLP | SharedSparseMLP:
        if config.experts is None:
            sizes = (config.hidden, config.intermediate)
            return GatedMLP(weights, f"{name}.mlp", sizes, "silu", shard, bias=False)
        return SharedSparseMLP(
            weights, f"{name}.mlp", config.hidden, config.experts, hybrid.shared, shard
        )

    return DecoderLayer(weights, name or layer_name(layer), config, mixer, mlp, around_one=True)


def hybrid_model(
    weights: Weights,
    config: TextConfig,
    hybrid: HybridConfig,
    shard: Shard,
) -> Decoder[GatedAttention | GatedDelta]:
    """Build the language model."""
    return Decoder(
        weights,
        config,
        shard,
        lambda layer: hybrid_layer(weights, layer, config, hybrid, shard),
        rope=MultiRope(config.rope, hybrid.rotary_dim, weights.device),
        around_one=True,
    )
