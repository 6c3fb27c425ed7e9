"""A GLM-OCR checkpoint's network, and what its tensors are called.

Layers have norms before and behind attention and MLP. The layer behind the last, which drafts
tokens, is left out.
"""

from __future__ import annotations

import torch

from saccade.families.qwen_vl.glm_ocr.spec import GlmSpec
from saccade.families.qwen_vl.glm_ocr.vision import CogTower
from saccade.kernels.matrix import Rows
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.attention import CausalAttention, HeadsConfig
from saccade.nn.decoder import Decoder, DecoderLayer, MultiRope, layer_name
from saccade.nn.family_model import FamilyModel, language_matrices
from saccade.nn.mlp import GatedMLP
from saccade.nn.norm import RMSNorm
from saccade.nn.protocol import Attention, LanguageModel, VisionNet
from saccade.nn.text_config import TextConfig
from saccade.nn.weights import Weights
from saccade.parallel import Shard


class SandwichLayer(DecoderLayer[CausalAttention]):
    """A layer that also normalises what attention and MLP add."""

    __slots__ = ("mixed_norm", "out_norm")

    def __init__(self, weights: Weights, layer: int, config: TextConfig, shard: Shard) -> None:
        name = layer_name(layer)
        heads = HeadsConfig.of(config)
        sizes = config.hidden, config.intermediate
        super().__init__(
            weights,
            name,
            config,
            lambda name: CausalAttention(weights, f"{name}.self_attn", heads, shard, layer),
            lambda name: GatedMLP(
                weights, f"{name}.mlp", sizes, "silu", shard, bias=False, fused=True
            ),
        )
        norm = config.hidden, config.rms_eps
        self.mixed_norm = RMSNorm(weights, f"{name}.post_self_attn_layernorm", *norm)
        self.out_norm = RMSNorm(weights, f"{name}.post_mlp_layernorm", *norm)

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed: Rows
        if delta is None:
            normed = self.mixer_norm(x)
        else:
            x, normed = self.mixer_norm.add_rows(x, delta, self.mixer.group)
        mixed = self.mixed_norm(self.mixer(normed, rotation, attention))
        x, normed = self.mlp_norm.add_rows(x, mixed, self.mlp.group)
        return x, self.out_norm(self.mlp(normed))


class GlmModel(FamilyModel):
    """Names become `visual.*`, `language_model.*` and `lm_head.weight`, as in folders and in GGUF
    files, which have the language model alone in `model.*`.
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
            lambda layer: SandwichLayer(weights, layer, config, shard),
            rope=MultiRope(config.rope, config.head_dim, weights.device),
            own_head=True,
        )

    def harmless(self, name: str) -> bool:
        """Count also the layer behind the last."""
        return super().harmless(name) or name.startswith(f"{layer_name(self.spec.text.layers)}.")
