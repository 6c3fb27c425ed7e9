"""The network of DeepSeek-V2's language model, which DeepSeek-VL2 and Kimi-VL use.

It has latent attention (MLA), or ordinary attention in the smallest model. The first layers have an
MLP, and the others have experts, some of which are shared by all tokens.
"""

from __future__ import annotations

import torch

from saccade.kernels.matrix import DenseMatrix, Rows
from saccade.kernels.reference.moe import Routes
from saccade.nn.attention import CausalAttention, HeadsConfig
from saccade.nn.decoder import Decoder, DecoderLayer, MultiRope, layer_name
from saccade.nn.family_model import language_matrices
from saccade.nn.mlp import GatedMLP
from saccade.nn.moe import MoEShape, RoutedExperts
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.kit.deepseek_text import DeepseekText, Routing
from saccade.plugins.models.kit.latent import LatentAttention

QUANTISABLE = language_matrices(
    r"(self_attn\.([qokv]|q_[ab])_proj|self_attn\.kv_a_proj_with_mqa"
    r"|(mlp|mlp\.shared_experts|mlp\.experts\.\d+)\.[a-z]+_proj)\.weight"
    r"|mlp\.experts\.[a-z_]+_proj"
)
"""The matrices that may be quantized. Those that project latents to keys and values may not."""


class SharedExperts:
    """Routed experts, and one MLP for the shared experts, which processes all tokens."""

    __slots__ = ("bias", "experts", "ops", "router", "routing", "shared")

    group = 0  # the router needs unquantized rows

    def __init__(self, weights: Weights, name: str, text: DeepseekText, shard: Shard) -> None:
        experts, routing, hidden = text.shape.experts, text.routing, text.shape.hidden
        assert experts is not None and routing is not None, "asked for layers with experts alone"
        self.routing, self.ops = routing, weights.ops
        router = weights.load(Part(f"{name}.gate.weight", (experts.count, hidden)))
        self.router = DenseMatrix(router).ready(self.ops)
        self.bias: torch.Tensor | None = None
        if routing.method == "noaux_tc":
            part = Part(f"{name}.gate.e_score_correction_bias", (experts.count,))
            self.bias = weights.load(part).float()
        sizes = MoEShape(hidden, experts.width, experts.count, experts.top, "silu")
        self.experts = RoutedExperts(weights, f"{name}.experts", sizes, shard)
        width = routing.shared * experts.width
        self.shared = (
            GatedMLP(weights, f"{name}.shared_experts", (hidden, width), "silu", shard, bias=False)
            if width
            else None
        )

    def __call__(self, x: Rows) -> torch.Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        assert isinstance(x, torch.Tensor)
        routes = route(self.router.multiply(self.ops, x), self.routing, self.bias)
        mixed = self.experts(x, routes)
        return mixed if self.shared is None else mixed + self.shared(x)


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routes:
    """Choose the experts and their weights for router logits [T, E].

    `bias` is added to the scores for the choice of experts, but not for their weights.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scoring == "softmax" else wide.sigmoid()
    chosen = scores if bias is None else scores + bias
    if routing.method != "greedy" and routing.groups > 1:
        chosen = _within_groups(chosen, routing)
    experts = chosen.topk(routing.top, dim=-1).indices
    shares = scores.gather(1, experts)
    if routing.normalised and routing.top > 1:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return Routes(experts, (shares * routing.factor).to(logits.dtype))


def _within_groups(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    groups = scores.view(len(scores), routing.groups, -1)
    best = groups.topk(2 if routing.method == "noaux_tc" else 1, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(routing.top_groups, dim=-1).indices, value=True)
    found: torch.Tensor = groups.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(1)
    return found


def _layer(
    weights: Weights, layer: int, text: DeepseekText, shard: Shard
) -> DecoderLayer[CausalAttention | LatentAttention]:
    config, latent = text.shape, text.latent

    def mixer(name: str) -> CausalAttention | LatentAttention:
        if latent is not None:
            sizes = (config.hidden, config.heads)
            return LatentAttention(weights, f"{name}.self_attn", sizes, latent, shard, layer)
        heads = HeadsConfig.of(config)
        return CausalAttention(weights, f"{name}.self_attn", heads, shard, layer)

    def mlp(name: str) -> GatedMLP | SharedExperts:
        if config.experts is None or layer not in config.experts.layers:
            sizes = (config.hidden, config.intermediate)
            return GatedMLP(weights, f"{name}.mlp", sizes, "silu", shard, bias=False)
        return SharedExperts(weights, f"{name}.mlp", text, shard)

    return DecoderLayer(weights, layer_name(layer), config, mixer, mlp)


def deepseek_decoder(
    weights: Weights, text: DeepseekText, shard: Shard
) -> Decoder[CausalAttention | LatentAttention]:
    """Build the decoder.

    Raises CheckpointError if a tensor is missing or has another shape.
    """
    return Decoder(
        weights,
        text.shape,
        shard,
        lambda layer: _layer(weights, layer, text, shard),
        rope=MultiRope(text.shape.rope, text.rotary_dim, weights.device),
    )
