"""Gemma 3's language model: norms before and after attention and MLP, windows in most layers.

Each kind of layer has its own rotary tables. Norms hold what their weights are more than 1. Windows
are the attention's to know (`AttentionShape`).
"""

from __future__ import annotations

import torch

from saccade.families.gemma3.config import GemmaText
from saccade.kernels.matrix import Rows
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.attention import CausalAttention, HeadsConfig
from saccade.nn.decoder import MultiRope
from saccade.nn.embedding import TokenEmbedding, make_head
from saccade.nn.mlp import GatedMLP
from saccade.nn.norm import RMSNorm
from saccade.nn.protocol import Attention, Batch
from saccade.nn.weights import Weights
from saccade.parallel import Shard


class GemmaLayer:
    """Layer with attention, then an MLP, each with norms before and after, and a residual."""

    __slots__ = ("mixed_norm", "mixer", "mixer_norm", "mlp", "mlp_norm", "out_norm")

    def __init__(self, weights: Weights, layer: int, text: GemmaText, shard: Shard) -> None:
        shape, name = text.shape, f"language_model.layers.{layer}"

        def norm(part: str) -> RMSNorm:
            sizes = (shape.hidden, shape.rms_eps)
            return RMSNorm(weights, f"{name}.{part}", *sizes, around_one=True)

        heads = HeadsConfig(
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            qkv_bias=False,
            qk_norm_eps=shape.rms_eps,
            around_one=True,
            # Attention divides scores by the root of a head's size.
            query_factor=(shape.head_dim / text.query_scalar) ** 0.5,
        )
        self.mixer_norm = norm("input_layernorm")
        self.mixer = CausalAttention(weights, f"{name}.self_attn", heads, shard, layer)
        self.mixed_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        sizes = (shape.hidden, shape.intermediate)
        self.mlp = GatedMLP(weights, f"{name}.mlp", sizes, text.activation, shard, bias=False)
        self.out_norm = norm("post_feedforward_layernorm")

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer. The stream [T, hidden] is x + delta, before and after."""
        normed: Rows
        if delta is None:
            normed = self.mixer_norm(x)
        else:
            x, normed = self.mixer_norm.add_rows(x, delta, self.mixer.group)
        mixed = self.mixed_norm(self.mixer(normed, rotation, attention))
        x, normed = self.mlp_norm.add_rows(x, mixed, self.mlp.group)
        return x, self.out_norm(self.mlp(normed))


class GemmaDecoder:
    """Turns tokens and image rows into states, and states into logits.

    Implements `nn.protocol.LanguageModel`.
    """

    __slots__ = ("embedding", "head", "hidden", "layers", "norm", "ropes", "scale", "windows")

    def __init__(self, weights: Weights, text: GemmaText, shard: Shard) -> None:
        shape = text.shape
        table, self.hidden = (shape.vocab_size, shape.hidden), shape.hidden
        self.embedding = TokenEmbedding(weights, "language_model.embed_tokens.weight", table, shard)
        # Rounded as the model was trained.
        self.scale = float(torch.tensor(shape.hidden**0.5).to(weights.dtype))
        self.layers = [GemmaLayer(weights, i, text, shard) for i in range(shape.layers)]
        sizes = (shape.hidden, shape.rms_eps)
        self.norm = RMSNorm(weights, "language_model.norm", *sizes, around_one=True)
        self.head = make_head(weights, self.embedding, tied=shape.tied)
        self.windows = text.windows
        self.ropes = tuple(
            MultiRope(rope, shape.head_dim, weights.device)
            for rope in (shape.rope, text.local_rope)
        )

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Return the states [T, hidden] after the last layer.

        Token embeddings are scaled, image rows are not.
        """
        x = self.embedding(batch.tokens).mul_(self.scale)  # [T, hidden]
        if batch.splice_rows.shape[0]:
            x.index_copy_(0, batch.splice_rows, batch.embeddings)
        everywhere, nearby = (rope(batch.positions) for rope in self.ropes)
        delta: torch.Tensor | None = None
        for layer, window in zip(self.layers, self.windows, strict=True):
            x, delta = layer(x, delta, nearby if window else everywhere, attention)
        return x if delta is None else x + delta

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise states [R, hidden]."""
        return self.norm(states)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits, [R, hidden] -> [R, vocab_size] in float32."""
        return self.head(self.normed(states)).float()
