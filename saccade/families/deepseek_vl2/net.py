"""A DeepSeek-VL2 checkpoint's network, and what its tensors are called."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from saccade.families.deepseek_vl2.spec import DeepseekSpec
from saccade.families.deepseek_vl2.text import deepseek_decoder
from saccade.families.deepseek_vl2.vision import DeepseekTower
from saccade.nn.net import NoVision, TowerAlone, WholeNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

HEAD = "lm_head.weight"
HARMLESS = re.compile(r"rotary_emb\.|inv_freq$|^vision_model\.attn_pool\.")
"""Buffers that the configuration decides anyway, and the tower's own head."""
PROJECTION = re.compile(
    r"language_model\.layers\.\d+\."
    r"((self_attn\.[qo]_proj|self_attn\.q_[ab]_proj|self_attn\.[kv]_proj"
    r"|self_attn\.kv_a_proj_with_mqa"
    r"|(mlp|mlp\.shared_experts|mlp\.experts\.\d+)\.[a-z]+_proj)\.weight|mlp\.experts\.[a-z_]+_proj)"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight"
)
TOWER = (
    ("vision.pos_embed", "vision_model.embeddings.position_embedding.weight"),
    ("vision.patch_embed.proj.", "vision_model.embeddings.patch_embedding."),
    ("vision.norm.", "vision_model.post_layernorm."),
    ("vision.blocks.", "vision_model.encoder.layers."),
    ("vision.", "vision_model."),
)
BLOCK = (
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.qkv.", ".self_attn.qkv."),
    (".attn.proj.", ".self_attn.out_proj."),
)


@dataclass(frozen=True, slots=True)
class DeepseekModel:
    """Implements `nn.protocol.FamilyModel`."""

    spec: DeepseekSpec

    def build_tower(self, weights: Weights, encoder_shard: Shard) -> TowerAlone:
        """The vision tower alone; no other tensor is read. Raises as `build` does."""
        tower = DeepseekTower(weights, self.spec.vision, self.spec.images, encoder_shard)
        return TowerAlone(self.spec, weights.ops, tower, weights.adapters)

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
        """`encoder_shard` is the vision tower's.

        Raises CheckpointError where a tensor is missing or misshapen.
        """
        tower = (
            self.build_tower(weights, encoder_shard).vision if self.spec.sees_images else NoVision()
        )
        shape = self.spec.text.shape
        tied = shape.tied and not weights.has(HEAD)
        text = replace(self.spec.text, shape=replace(shape, tied=tied))
        decoder = deepseek_decoder(weights, text, shard)
        return WholeNet(self.spec, weights.ops, tower, decoder, weights.adapters)

    def canonical_name(self, name: str) -> str:
        """The name that layers ask for: `vision_model.*`, `projector.*`, `image_newline`,
        `view_seperator` (as the hub has it), `language_model.*`, `lm_head.weight`.
        """
        for theirs, ours in TOWER:
            if name.startswith(theirs):
                name = name.replace(theirs, ours, 1)
                for part, renamed in BLOCK:
                    name = name.replace(part, renamed, 1)
                return name
        name = name.removeprefix("language.")
        return name.replace("model.", "language_model.", 1) if name.startswith("model.") else name

    def harmless(self, name: str) -> bool:
        """True for a canonical name that may be passed over in silence if no layer asks for it."""
        return HARMLESS.search(name) is not None

    def projection(self, name: str) -> bool:
        """True for the canonical name of a matrix of the language model's layers, or of its head,
        which may be quantised. What makes keys and values of latents is not, nor the tower.
        """
        return PROJECTION.fullmatch(name) is not None
