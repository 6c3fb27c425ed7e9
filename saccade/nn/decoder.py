"""The language models of the Qwen-VL families. These are Qwen2 (biases on query, key and value) and
Qwen3 (normalized queries and keys). Qwen3 may have experts.

Rotary tables are computed once per forward pass and shared by all layers. Only rows whose logits
are requested go through the final norm and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from saccade.kernels.matrix import Rows
from saccade.kernels.reference.rotary import Rotation, rotary_tables, section_axes
from saccade.nn.attention import CausalAttention, HeadsConfig
from saccade.nn.embedding import TokenEmbedding, make_head
from saccade.nn.mlp import GatedMLP
from saccade.nn.norm import RMSNorm
from saccade.nn.protocol import Attention, Batch
from saccade.nn.shapes import RopeConfig, TextConfig
from saccade.nn.weights import Weights
from saccade.parallel import Shard


class MultiRope:
    """Computes rotary tables from multi-axis positions. Each frequency uses one axis (mRoPE)."""

    __slots__ = ("amplitude", "axis", "inv_freq", "pairs")

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self.inv_freq = 1.0 / config.theta**steps / config.factor  # [D / 2]
        self.amplitude = 1.0
        if (yarn := config.yarn) is not None:
            self.amplitude = yarn.amplitude
            low, high = yarn.bounds(config.theta, head_dim)
            places = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
            divided = ((places - low) / (high - low)).clamp_(0, 1)
            self.inv_freq = self.inv_freq * (1 - divided) + self.inv_freq / yarn.factor * divided
        self.pairs = config.pairs
        self.axis = section_axes(config.sections, interleaved=config.interleaved).to(device)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of queries and keys at positions [axes, T]."""
        angles = positions.t().index_select(1, self.axis) * self.inv_freq  # float32
        cos, sin = rotary_tables(angles, self.pairs)
        if self.amplitude != 1.0:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        return Rotation(cos, sin, pairs=self.pairs)


Rope = Callable[[torch.Tensor], Rotation]
"""Computes the rotation of queries and keys at positions [axes, T]."""


class Mixer(Protocol):
    """The part of a layer that mixes tokens: attention, or a replacement for it.

    group: as in `nn.linear.Linear`.
    """

    @property
    def group(self) -> int: ...

    def __call__(self, x: Rows, rotation: Rotation, attention: Attention, /) -> torch.Tensor: ...


class FeedForward(Protocol):
    """The part of a layer after the mixer: an MLP, or a mixture of experts."""

    @property
    def group(self) -> int: ...

    def __call__(self, x: Rows, /) -> torch.Tensor: ...


M = TypeVar("M", bound=Mixer)


class ThenNorm:
    """A mixer or an MLP, and a norm that is applied to its output."""

    __slots__ = ("group", "norm", "part")

    def __init__(self, part: Mixer | FeedForward, norm: RMSNorm) -> None:
        self.part, self.norm = part, norm
        self.group = part.group

    def __call__(self, x: Rows, *more: Any) -> torch.Tensor:
        return self.norm(self.part(x, *more))


class DecoderLayer(Generic[M]):
    """A pre-norm layer: a token mixer, then an MLP or experts, each with a residual connection.

    name: the name of the layer in the checkpoint.
    mixer, mlp: build the two parts from that name.
    mlp_norm: the name of the second norm.
    around_one: as in `RMSNorm`.
    """

    __slots__ = ("mixer", "mixer_norm", "mlp", "mlp_norm")

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: TextConfig,
        mixer: Callable[[str], M],
        mlp: Callable[[str], FeedForward],
        *,
        mlp_norm: str = "post_attention_layernorm",
        around_one: bool = False,
    ) -> None:
        def norm(part: str) -> RMSNorm:
            sizes = (config.hidden, config.rms_eps)
            return RMSNorm(weights, f"{name}.{part}", *sizes, around_one=around_one)

        # Keep this order, in which checkpoints with random weights are generated.
        self.mixer_norm = norm("input_layernorm")
        self.mixer = mixer(name)
        self.mlp_norm = norm(mlp_norm)
        self.mlp = mlp(name)

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer for the residual stream `x + delta`, and return the result as two
        terms, too.

        All are [T, hidden]. The next norm computes the sum as it normalizes. `delta` is None if
        there is only one term.
        """
        normed: Rows
        if delta is None:
            normed = self.mixer_norm(x)
        else:
            x, normed = self.mixer_norm.add_rows(x, delta, self.mixer.group)
        mixed = self.mixer(normed, rotation, attention)
        x, normed = self.mlp_norm.add_rows(x, mixed, self.mlp.group)
        return x, self.mlp(normed)


def layer_name(layer: int) -> str:
    """Return the name of the language model's layer `layer` in a checkpoint."""
    return f"language_model.layers.{layer}"


class Decoder(Generic[M]):
    """Maps tokens and image embeddings to hidden states, and hidden states to logits.

    Implements `nn.protocol.LanguageModel`. `layer` builds a layer from its index.
    """

    __slots__ = ("embedding", "head", "hidden", "layers", "norm", "rope")

    def __init__(
        self,
        weights: Weights,
        config: TextConfig,
        shard: Shard,
        layer: Callable[[int], DecoderLayer[M]],
        *,
        rope: Rope,
        around_one: bool = False,
    ) -> None:
        """Build the embedding, the layers, the final norm and the head.

        around_one: as in `RMSNorm`.
        """
        table = (config.vocab_size, config.hidden)
        self.hidden = config.hidden
        self.embedding = TokenEmbedding(weights, "language_model.embed_tokens.weight", table, shard)
        self.layers = [layer(i) for i in range(config.layers)]
        self.norm = RMSNorm(
            weights,
            "language_model.norm",
            config.hidden,
            config.rms_eps,
            around_one=around_one,
        )
        self.head = make_head(weights, self.embedding, tied=config.tied)
        self.rope = rope

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Return the hidden states [T, hidden] after the last layer.

        Image rows take the first level of their embedding instead of the token embedding. Level
        i + 1 (deepstack) is added after layer i.
        """
        x = self.embedding(batch.tokens)  # [T, hidden]
        deep: list[torch.Tensor] = []
        if batch.splice_rows.shape[0]:
            first, *deep = batch.embeddings.split(self.hidden, dim=1)
            x.index_copy_(0, batch.splice_rows, first)
        rotation = self.rope(batch.positions)
        delta: torch.Tensor | None = None
        for i, layer in enumerate(self.layers):
            x, delta = layer(x, delta, rotation, attention)
            if i < len(deep):
                x = (x + delta).index_add_(0, batch.splice_rows, deep[i])
                delta = None
        return x if delta is None else x + delta

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to [R, hidden]."""
        return self.norm(states)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Map [R, hidden] -> [R, vocab_size] in float32."""
        return self.head(self.normed(states)).float()


def attention_decoder(
    weights: Weights, config: TextConfig, shard: Shard
) -> Decoder[CausalAttention]:
    """Build the decoder of Qwen2 or Qwen3, depending on the configuration."""
    heads = HeadsConfig.of(config)

    def mixer(layer: int, name: str) -> CausalAttention:
        return CausalAttention(weights, f"{name}.self_attn", heads, shard, layer)

    return plain_decoder(weights, config, shard, mixer)


def plain_decoder(
    weights: Weights,
    config: TextConfig,
    shard: Shard,
    mixer: Callable[[int, str], M],
    *,
    rope: Rope | None = None,
) -> Decoder[M]:
    """Build a decoder with Qwen's MLPs or experts, and with custom mixers.

    mixer: builds the mixer of a layer from the layer's index and its name.
    rope: computes the rotation. The default is the configuration's RoPE over entire heads.
    """
    return Decoder(
        weights,
        config,
        shard,
        lambda layer: _plain_layer(weights, layer, config, shard, partial(mixer, layer)),
        rope=rope or MultiRope(config.rope, config.head_dim, weights.device),
    )


def _plain_layer(
    weights: Weights, layer: int, config: TextConfig, shard: Shard, mixer: Callable[[str], M]
) -> DecoderLayer[M]:
    def mlp(name: str) -> FeedForward:
        experts = config.experts
        if experts is None or layer not in experts.layers:
            sizes = (config.hidden, config.intermediate)
            return GatedMLP(weights, f"{name}.mlp", sizes, "silu", shard, bias=False)
        from saccade.nn.moe import MoEShape, SparseMLP  # for models with experts

        routed = MoEShape(config.hidden, experts.width, experts.count, experts.top, "silu")
        return SparseMLP(weights, f"{name}.mlp", routed, shard)

    return DecoderLayer(weights, layer_name(layer), config, mixer, mlp)
