"""Builds Gemma 3's network, and maps tensor names to canonical ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from saccade.kernels.matrix import DenseMatrix
from saccade.nn.attention import CausalAttention, HeadsConfig
from saccade.nn.decoder import DecoderLayer, MultiRope, ThenNorm, layer_name
from saccade.nn.embedding import TokenEmbedding, make_head
from saccade.nn.family_model import FamilyModel
from saccade.nn.linear import Linear
from saccade.nn.mlp import GatedMLP
from saccade.nn.norm import RMSNorm
from saccade.nn.patches import merged_order
from saccade.nn.protocol import Attention, Batch, LanguageModel, VisionNet
from saccade.nn.shapes import SiglipConfig
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.gemma3.images import SquareRules
from saccade.plugins.models.gemma3.spec import Gemma3Spec, GemmaText
from saccade.plugins.models.kit.siglip import SiglipTower

PROJECTOR = "multi_modal_projector"


class MeanProjector:
    """Averages patches into tokens, and projects them to embeddings. Replicated on every rank."""

    __slots__ = ("norm", "project")

    def __init__(self, weights: Weights, config: SiglipConfig) -> None:
        name, sizes = f"{PROJECTOR}.mm_soft_emb_norm", (config.hidden, config.norm_eps)
        self.norm = RMSNorm(weights, name, *sizes, around_one=True)
        shape = (config.hidden, config.out_hidden)
        matrix = weights.load(Part(f"{PROJECTOR}.mm_input_projection_weight", shape))
        self.project = Linear(weights.ops, DenseMatrix(matrix.t().contiguous()))

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Map [M, merge^2, hidden] to [M, out]."""
        return self.project(self.norm(patches.mean(1)))


def gemma3_tower(
    weights: Weights, config: SiglipConfig, rules: SquareRules, shard: Shard
) -> SiglipTower:
    """Load the vision encoder.

    Raises CheckpointError if a tensor is missing or has the wrong shape.
    """
    row, column = merged_order(config.across, config.across, config.merge)
    order = torch.from_numpy(row * config.across + column)
    return SiglipTower(weights, config, rules.colours, order, MeanProjector(weights, config), shard)


def gemma_layer(
    weights: Weights, layer: int, text: GemmaText, shard: Shard
) -> DecoderLayer[ThenNorm]:
    """Load one layer, which has norms before and after both attention and MLP. Raises
    CheckpointError if a tensor is missing or has the wrong shape.
    """
    shape = text.shape
    heads = replace(
        HeadsConfig.of(shape),
        around_one=True,
        # Attention divides scores by sqrt(head_dim), so queries make up for the difference.
        query_factor=(shape.head_dim / text.query_scalar) ** 0.5,
    )
    sizes = (shape.hidden, shape.intermediate)

    def mixer(name: str) -> ThenNorm:
        attention = CausalAttention(weights, f"{name}.self_attn", heads, shard, layer)
        return ThenNorm(attention, norm(f"{name}.post_attention_layernorm"))

    def mlp(name: str) -> ThenNorm:
        gated = GatedMLP(weights, f"{name}.mlp", sizes, text.activation, shard, bias=False)
        return ThenNorm(gated, norm(f"{name}.post_feedforward_layernorm"))

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights, name, shape.hidden, shape.rms_eps, around_one=True)

    name, before = layer_name(layer), "pre_feedforward_layernorm"
    return DecoderLayer(weights, name, shape, mixer, mlp, mlp_norm=before, around_one=True)


class GemmaDecoder:
    """Gemma 3's language model: maps tokens and image embeddings to states, and states to logits.

    Implements `nn.protocol.LanguageModel`.
    """

    __slots__ = ("embedding", "head", "hidden", "layers", "norm", "ropes", "scale", "windows")

    def __init__(self, weights: Weights, text: GemmaText, shard: Shard) -> None:
        shape = text.shape
        table, self.hidden = (shape.vocab_size, shape.hidden), shape.hidden
        self.embedding = TokenEmbedding(weights, "language_model.embed_tokens.weight", table, shard)
        # Rounded to the weights' dtype, as in training.
        self.scale = float(torch.tensor(shape.hidden**0.5).to(weights.dtype))
        self.layers = [gemma_layer(weights, i, text, shard) for i in range(shape.layers)]
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

        Token embeddings are scaled, but image embeddings are not.
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
        """Normalize states [R, hidden]."""
        return self.norm(states)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits, [R, hidden] -> [R, vocab_size] in float32."""
        return self.head(self.normed(states)).float()


class Gemma3Model(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_model.*`,
    `multi_modal_projector.*`, `language_model.*` and `lm_head.weight`, for older and newer files
    alike.
    """

    spec: Gemma3Spec

    names = (
        (r"^model\.", ""),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "language_model."),
        (r"^vision_tower\.(vision_model\.)?", "vision_model."),
        (r"^(?!(vision_model|multi_modal_projector|language_model|lm_head)\.)", "language_model."),
    )
    seeing = ("vision_model.", "multi_modal_projector.")
    unused = ("vision_model.head.",)  # SigLIP's pooling head

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return gemma3_tower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return GemmaDecoder(weights, self.spec.text, shard)
