"""Builds HunyuanOCR's network, and maps tensor names to canonical ones.

Queries and keys are normalized after the rotation.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from saccade.kernels.matrix import Rows
from saccade.kernels.reference.rotary import Rotation, rotate_, section_axes
from saccade.nn.attention import CausalAttention, HeadsConfig
from saccade.nn.decoder import MultiRope, plain_decoder
from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import Attention, LanguageModel, VisionNet
from saccade.nn.shapes import RopeConfig
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.hunyuan_vl.spec import HunyuanSpec
from saccade.plugins.models.hunyuan_vl.vision import LineTower


class ValueRope(MultiRope):
    """Computes rotary tables whose axes divide the values of a head instead of the pairs of values.

    So the two values of a pair may be rotated by different axes, as in transformers.
    """

    __slots__ = ("value_axis", "values")

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        super().__init__(config, head_dim, device)
        sections = [2 * count for count in config.sections]
        self.value_axis = section_axes(sections, interleaved=False).to(device)  # [D]
        self.values = self.inv_freq.repeat(2)  # [D]

    def __call__(self, positions: torch.Tensor) -> Rotation:
        angles = positions.t().index_select(1, self.value_axis) * self.values
        sin, half = angles.sin(), len(self.inv_freq)
        sin[:, :half].neg_()
        return Rotation(angles.cos(), sin)


class LateNormAttention(CausalAttention):
    """Self-attention that normalizes queries and keys after the rotation."""

    __slots__ = ()

    def __call__(self, x: Rows, rotation: Rotation, attention: Attention) -> torch.Tensor:
        """Map x [T, hidden] -> [T, hidden]."""
        ops, norm = self.qkv.ops, self.qk_norm
        assert norm is not None, "loaded with norms"
        made = self.qkv(x)
        qkv = made.view(len(made), self.heads + 2 * self.kv_heads, -1)
        turned = qkv[:, : self.heads + self.kv_heads]
        rotate_(rotation, turned)  # not `ops`: GPU kernels rotate both values of a pair alike
        turned.copy_(ops.rms_norm(turned, *norm))
        attended = attention(qkv, _still(rotation), None, self.layer)
        return self.out(attended.flatten(1))


def _still(rotation: Rotation) -> Rotation:
    """Return an identity rotation for the same number of tokens."""
    cos, sin = torch.ones_like(rotation.cos[:, :2]), torch.zeros_like(rotation.sin[:, :2])
    return replace(rotation, cos=cos, sin=sin)


class HunyuanModel(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_tower.*`, `language_model.*` and
    `lm_head.weight`. Within layers, they are the names in `nn/decoder.py`.
    """

    spec: HunyuanSpec

    names = (
        (r"^model\.(?=vision_tower\.|language_model\.)", ""),
        (r"^(model\.)?vit\.", "vision_tower."),
        (r"^model\.", "language_model."),
        (r"^vision_tower\.perceive\.", "vision_tower.patch_merger."),
        (r"^(vision_tower\.patch_merger)\.proj\.0\.", r"\1.proj_conv."),
        (r"^(vision_tower\.patch_merger)\.proj\.2\.", r"\1.proj_out."),
        (r"^(vision_tower\.layers\.\d+)\.input_layernorm\.", r"\1.layer_norm1."),
        (r"^(vision_tower\.layers\.\d+)\.post_attention_layernorm\.", r"\1.layer_norm2."),
        (r"^(vision_tower\.layers\.\d+\.mlp)\.dense_h_to_4h\.", r"\1.fc1."),
        (r"^(vision_tower\.layers\.\d+\.mlp)\.dense_4h_to_h\.", r"\1.fc2."),
        (r"^(language_model\.layers\.\d+\.self_attn)\.query_layernorm\.", r"\1.q_norm."),
        (r"^(language_model\.layers\.\d+\.self_attn)\.key_layernorm\.", r"\1.k_norm."),
    )
    seeing = ("vision_tower.",)
    unused = ("vision_tower.patch_merger.image_sep",)

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return LineTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        config = self.spec.text
        heads = HeadsConfig.of(config)
        kind = MultiRope if self.spec.paired else ValueRope

        def mixer(layer: int, name: str) -> LateNormAttention:
            return LateNormAttention(weights, f"{name}.self_attn", heads, shard, layer)

        rope = kind(config.rope, config.head_dim, weights.device)
        return plain_decoder(weights, config, shard, mixer, rope=rope)
