"""Builds GLM-OCR's network, and maps tensor names to canonical ones.

Layers have norms before and after both attention and MLP. The last layer in the files, which
predicts draft tokens, is not loaded.
"""

from __future__ import annotations

from saccade.nn.attention import CausalAttention, HeadsConfig
from saccade.nn.decoder import Decoder, DecoderLayer, MultiRope, ThenNorm, layer_name
from saccade.nn.family_model import FamilyModel, language_matrices
from saccade.nn.mlp import GatedMLP
from saccade.nn.norm import RMSNorm
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.shapes import TextConfig
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.glm_ocr.spec import GlmSpec
from saccade.plugins.models.glm_ocr.vision import CogTower


def sandwich_layer(
    weights: Weights, layer: int, config: TextConfig, shard: Shard
) -> DecoderLayer[ThenNorm]:
    """Load one layer. Raises CheckpointError if a tensor is missing or has another shape."""
    heads, sizes = HeadsConfig.of(config), (config.hidden, config.intermediate)

    def mixer(name: str) -> ThenNorm:
        attention = CausalAttention(weights, f"{name}.self_attn", heads, shard, layer)
        return ThenNorm(attention, norm(f"{name}.post_self_attn_layernorm"))

    def mlp(name: str) -> ThenNorm:
        gated = GatedMLP(weights, f"{name}.mlp", sizes, "silu", shard, bias=False, fused=True)
        return ThenNorm(gated, norm(f"{name}.post_mlp_layernorm"))

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights, name, config.hidden, config.rms_eps)

    return DecoderLayer(weights, layer_name(layer), config, mixer, mlp)


class GlmModel(FamilyModel):
    """Builds the network. Tensor names are converted to `visual.*`, `language_model.*` and
    `lm_head.weight`. GGUF files, which have only the language model, prefix its names with
    `model.`.
    """

    spec: GlmSpec

    names = ((r"^model\.(?=visual\.|language_model\.)", ""), (r"^model\.", "language_model."))
    quantisable = language_matrices(r"(self_attn|mlp)\.[a-z_]+_proj\.weight")
    seeing = ("visual.",)

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return CogTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        config = self.spec.text
        return Decoder(
            weights,
            config,
            shard,
            lambda layer: sandwich_layer(weights, layer, config, shard),
            rope=MultiRope(config.rope, config.head_dim, weights.device),
        )

    def harmless(self, name: str) -> bool:
        """Return True also for the tensors of the additional last layer, which predicts draft
        tokens.
        """
        return super().harmless(name) or name.startswith(f"{layer_name(self.spec.text.layers)}.")
