"""Gemma 4's language model, which has layers of two shapes, and a second token embedding per layer.

The last layers may reuse keys and values of earlier ones. Windows and attention within images are
implemented by the attention backend (`AttentionShape`).
"""

from __future__ import annotations

import torch

from saccade.kernels.matrix import DenseMatrix, Rows
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.rotary import Rotation, rotary_tables
from saccade.nn.embedding import TokenEmbedding, make_head
from saccade.nn.linear import Column, Linear, RowLinear
from saccade.nn.mlp import GatedMLP, activation
from saccade.nn.moe import MoEShape, RoutedExperts
from saccade.nn.norm import RMSNorm
from saccade.nn.protocol import Attention, Batch
from saccade.nn.shapes import ExpertsConfig
from saccade.nn.weights import Part, Weights
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins.models.gemma4.config import Gemma4Text, PerLayer
from saccade.plugins.models.gemma4.layers import Rope

STACK = "language_model"


class PartialRope:
    """Computes rotary tables for 1-D positions. The last values of a head may stay unrotated."""

    __slots__ = ("inv_freq",)

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        rotated = int(rope.share * head_dim // 2)
        steps = torch.arange(0, 2 * rotated, 2, dtype=torch.float32, device=device) / head_dim
        self.inv_freq = torch.zeros(head_dim // 2, device=device)
        self.inv_freq[:rotated] = 1.0 / rope.theta**steps / rope.factor

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation for positions [1, T]."""
        return Rotation(*rotary_tables(positions[0].float()[:, None] * self.inv_freq))


class Gemma4Attention:
    """Attention that may reuse the KV cache of another layer.

    Queries, keys and values are normalized; the norm of values has no weights. Scores are not
    scaled.
    """

    __slots__ = (
        "before_values",
        "eps",
        "head_dim",
        "heads",
        "layer",
        "norm",
        "ones",
        "ops",
        "out",
        "owns",
        "qkv",
    )

    def __init__(
        self, weights: Weights, name: str, text: Gemma4Text, layer: int, shard: Shard
    ) -> None:
        shape = text.layers[layer]
        self.layer, self.owns = shape.source, shape.source == layer
        self.head_dim, self.eps, self.ops = shape.head_dim, text.rms_eps, weights.ops
        q, kv = (count * shape.head_dim for count in (text.heads, shape.kv_heads))
        self.heads = shard.divide(text.heads, "attention heads")
        sharing = shard.over(shape.kv_heads)
        kv_heads = sharing.divide(shape.kv_heads, "key/value heads") * self.owns
        names = ("k_proj",) if shape.same_values else ("k_proj", "v_proj")
        columns = [Column(f"{name}.q_proj", q, shard)]
        columns += [Column(f"{name}.{each}", kv, sharing) for each in names * self.owns]
        self.qkv = Linear.columns(weights, columns, text.hidden, bias=False)
        self.out = RowLinear(weights, f"{name}.o_proj", q, text.hidden, shard, bias=False)
        self.before_values = self.heads + (0 if shape.same_values else kv_heads)
        norms = [f"{name}.q_norm.weight"] * self.heads + [f"{name}.k_norm.weight"] * kv_heads
        weight = weights.load(*(Part(each, (shape.head_dim,)) for each in norms)).float()
        weight = weight.view(len(norms), shape.head_dim)
        weight[: self.heads] *= shape.head_dim**0.5  # attention divides scores by sqrt(head_dim)
        self.norm = QKNorm(weight, text.rms_eps)
        self.ones = torch.ones(shape.head_dim, dtype=weights.dtype, device=weights.device)

    def __call__(self, x: Rows, rotation: Rotation, attention: Attention) -> torch.Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        heads = self.qkv(x).unflatten(1, (-1, self.head_dim))
        if not self.owns:
            attended = attention.attend_cached(heads, rotation, self.norm, self.layer)
            return self.out(attended.flatten(1))
        keys_end = len(self.norm.weight)
        values = self.ops.rms_norm(heads[:, self.before_values :], self.ones, self.eps)
        qkv = torch.cat((heads[:, :keys_end], values), dim=1)
        attended = attention(qkv, rotation, self.norm, self.layer)
        return self.out(attended.flatten(1))


class LayerInput:
    """Adds the layer's own token embedding, gated by the residual stream, after the layer."""

    __slots__ = ("gate", "norm", "widen")

    def __init__(self, weights: Weights, name: str, text: Gemma4Text, width: int) -> None:
        act, hidden = activation(text.activation), text.hidden
        gate = [Column(f"{name}.per_layer_input_gate", width, UNSHARDED)]
        self.gate = Linear.columns(weights, gate, hidden, bias=False, activation=act)
        widen = [Column(f"{name}.per_layer_projection", hidden, UNSHARDED)]
        self.widen = Linear.columns(weights, widen, width, bias=False)
        self.norm = RMSNorm(weights, f"{name}.post_per_layer_input_norm", hidden, text.rms_eps)

    def __call__(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Add own [T, width] to x [T, hidden] -> [T, hidden]."""
        return x + self.norm(self.widen(self.gate(x) * own))


class ExpertsBeside:
    """Runs experts in parallel with the MLP on the same input, normalizes both results, and adds
    them.
    """

    __slots__ = (
        "expert_scales",
        "experts",
        "in_norm",
        "mlp_norm",
        "ops",
        "out_norm",
        "router",
        "router_norm",
        "top",
    )

    def __init__(
        self, weights: Weights, name: str, text: Gemma4Text, experts: ExpertsConfig, shard: Shard
    ) -> None:
        def norm(part: str) -> RMSNorm:
            return RMSNorm(weights, f"{name}.{part}", text.hidden, text.rms_eps)

        self.ops, self.top = weights.ops, experts.top
        router = Part(f"{name}.router.proj.weight", (experts.count, text.hidden))
        self.router = DenseMatrix(weights.load(router)).ready(self.ops)
        scale = weights.load(Part(f"{name}.router.scale", (text.hidden,)))
        self.router_norm = scale * text.hidden**-0.5, text.rms_eps
        self.expert_scales = weights.load(Part(f"{name}.router.per_expert_scale", (experts.count,)))
        sizes = (text.hidden, experts.width, experts.count, experts.top)
        shape = MoEShape(*sizes, text.activation, outputs_first=True)
        self.experts = RoutedExperts(weights, f"{name}.experts", shape, shard)
        self.mlp_norm = norm("post_feedforward_layernorm_1")
        self.in_norm = norm("pre_feedforward_layernorm_2")
        self.out_norm = norm("post_feedforward_layernorm_2")

    def __call__(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Add the experts' output on x to mixed, the MLP's output. All are [T, hidden]."""
        scores = self.router.multiply(self.ops, self.ops.rms_norm(x, *self.router_norm))
        routes = self.ops.route(scores, self.top)
        shares = routes.shares * self.expert_scales[routes.experts]
        found = self.experts(self.in_norm(x), routes._replace(shares=shares))
        return self.mlp_norm(mixed) + self.out_norm(found)


class Gemma4Layer:
    """A layer of attention and an MLP, each with norms before and after, and a residual
    connection.
    """

    __slots__ = (
        "beside",
        "layer_input",
        "mixed_norm",
        "mixer",
        "mixer_norm",
        "mlp",
        "mlp_norm",
        "out_norm",
        "scale",
    )

    def __init__(self, weights: Weights, layer: int, text: Gemma4Text, shard: Shard) -> None:
        name, shape = f"{STACK}.layers.{layer}", text.layers[layer]

        def norm(part: str) -> RMSNorm:
            return RMSNorm(weights, f"{name}.{part}", text.hidden, text.rms_eps)

        self.mixer_norm = norm("input_layernorm")
        self.mixer = Gemma4Attention(weights, f"{name}.self_attn", text, layer, shard)
        self.mixed_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        sizes = (text.hidden, shape.intermediate)
        self.mlp = GatedMLP(weights, f"{name}.mlp", sizes, text.activation, shard, bias=False)
        self.beside: ExpertsBeside | None = None
        if text.experts is not None:
            self.beside = ExpertsBeside(weights, name, text, text.experts, shard)
        self.out_norm = norm("post_feedforward_layernorm")
        self.layer_input: LayerInput | None = None
        if text.per_layer is not None:
            self.layer_input = LayerInput(weights, name, text, text.per_layer.width)
        self.scale = weights.load(Part(f"{name}.layer_scalar", (1,)))

    def __call__(
        self,
        x: torch.Tensor,
        own: torch.Tensor | None,
        rotation: Rotation,
        attention: Attention,
    ) -> torch.Tensor:
        """Map x [T, hidden] to [T, hidden].

        own [T, width]: the layer's token embeddings.
        """
        mixed = self.mixed_norm(self.mixer(self.mixer_norm(x), rotation, attention))
        x, normed = self.mlp_norm.add_rows(x, mixed, self.mlp.group)
        inner = self.mlp(normed)
        if self.beside is not None:
            inner = self.beside(x, inner)
        x = x + self.out_norm(inner)
        if self.layer_input is not None:
            assert own is not None
            x = self.layer_input(x, own)
        return x * self.scale


class PerLayerEmbedding:
    """Computes the additional token embedding of each layer: a row of a table, plus a projection of
    the decoder's input.
    """

    __slots__ = ("norm", "project", "projected_scale", "scale", "table", "width")

    def __init__(
        self, weights: Weights, text: Gemma4Text, per_layer: PerLayer, shard: Shard
    ) -> None:
        self.width = per_layer.width
        outputs = len(text.layers) * per_layer.width
        table = (per_layer.vocab_size, outputs)
        self.table = TokenEmbedding(weights, f"{STACK}.embed_tokens_per_layer.weight", table, shard)
        column = Column(f"{STACK}.per_layer_model_projection", outputs, UNSHARDED)
        self.project = Linear.columns(weights, [column], text.hidden, bias=False)
        name = f"{STACK}.per_layer_projection_norm"
        self.norm = RMSNorm(weights, name, per_layer.width, text.rms_eps)
        self.scale = _rounded(per_layer.width**0.5, weights)
        self.projected_scale = text.hidden**-0.5

    def __call__(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Map tokens [T] and x [T, hidden] to [T, layers, width]."""
        told = self.table(tokens).mul_(self.scale).unflatten(1, (-1, self.width))
        seen = (self.project(x) * self.projected_scale).unflatten(1, (-1, self.width))
        return (self.norm(seen) + told) * 2.0**-0.5


class Gemma4Decoder:
    """Maps tokens and image embeddings to states, and states to logits.

    Implements `nn.protocol.LanguageModel`.
    """

    __slots__ = (
        "cap",
        "embedding",
        "far",
        "head",
        "hidden",
        "layers",
        "near",
        "norm",
        "padding",
        "per_layer",
        "scale",
        "shapes",
        "silent",
    )

    def __init__(self, weights: Weights, text: Gemma4Text, shard: Shard) -> None:
        table, device = (text.vocab_size, text.hidden), weights.device
        self.hidden, self.cap, self.shapes = text.hidden, text.cap, text.layers
        self.embedding = TokenEmbedding(weights, f"{STACK}.embed_tokens.weight", table, shard)
        self.scale = _rounded(text.hidden**0.5, weights)
        self.silent = torch.tensor(text.silent.tokens, dtype=torch.int64, device=device)
        self.padding = text.silent.padding
        self.per_layer: PerLayerEmbedding | None = None
        if text.per_layer is not None:
            self.per_layer = PerLayerEmbedding(weights, text, text.per_layer, shard)
        self.layers = [Gemma4Layer(weights, i, text, shard) for i in range(len(text.layers))]
        self.norm = RMSNorm(weights, f"{STACK}.norm", text.hidden, text.rms_eps)
        self.head = make_head(weights, self.embedding, tied=text.tied)
        self.near = PartialRope(text.near, _head_dim(text, windows=True), device)
        self.far = PartialRope(text.far, _head_dim(text, windows=False), device)

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Return the states [T, hidden] after the last layer.

        Token embeddings are scaled, but image embeddings are not. Image tokens have the per-layer
        embedding of the padding token.
        """
        tokens = batch.tokens
        if len(self.silent):
            tokens = torch.where(torch.isin(tokens, self.silent), self.padding, tokens)
        x = self.embedding(tokens).mul_(self.scale)  # [T, hidden]
        if batch.splice_rows.shape[0]:
            x.index_copy_(0, batch.splice_rows, batch.embeddings)
        own = None if self.per_layer is None else self.per_layer(tokens, x)
        near, far = self.near(batch.positions), self.far(batch.positions)
        for i, (layer, shape) in enumerate(zip(self.layers, self.shapes, strict=True)):
            rotation = near if shape.window else far
            x = layer(x, None if own is None else own[:, i], rotation, attention)
        return x

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Normalize states [R, hidden]."""
        return self.norm(states)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits, [R, hidden] -> [R, vocab_size] in float32."""
        logits = self.head(self.normed(states)).float()
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def _head_dim(text: Gemma4Text, *, windows: bool) -> int:
    """Return the head size of the layers with windows, or of those without; 2 if there are none."""
    found = (each.head_dim for each in text.layers if (each.window is not None) == windows)
    return next(found, 2)


def _rounded(scale: float, weights: Weights) -> float:
    """Round `scale` to the dtype of the weights, as transformers does."""
    return float(torch.tensor(scale).to(weights.dtype))
