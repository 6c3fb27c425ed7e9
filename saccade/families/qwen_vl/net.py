"""A Qwen-VL checkpoint's network, and what its tensors are called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.families.qwen_vl.vision import VisionTower
from saccade.nn.decoder import attention_decoder
from saccade.nn.net import TowerAlone, WholeNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

HARMLESS = re.compile(r"rotary_emb\.|rotary_pos_emb\.|\.inv_freq$")
"""Buffers that old checkpoints carry and the configuration decides anyway."""
PROJECTION = re.compile(
    r"language_model\.layers\.\d+\."
    r"((self_attn|mlp|mlp\.experts\.\d+)\.[a-z]+_proj\.weight|mlp\.experts\.[a-z_]+_proj)"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight"
)


@dataclass(frozen=True, slots=True)
class QwenVLModel:
    """Implements `nn.protocol.FamilyModel`."""

    spec: QwenVLSpec

    def build_tower(self, weights: Weights, encoder_shard: Shard) -> TowerAlone:
        """The vision tower alone; no other tensor is read. Raises as `build` does."""
        return TowerAlone(
            self.spec, weights.ops, self._tower(weights, encoder_shard), weights.adapters
        )

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
        """`encoder_shard` is the vision tower's.

        Raises CheckpointError where a tensor is missing or misshapen.
        """
        tower = self._tower(weights, encoder_shard)
        text = attention_decoder(weights, self.spec.text, shard)
        return WholeNet(self.spec, weights.ops, tower, text, weights.adapters)

    def _tower(self, weights: Weights, shard: Shard) -> VisionTower:
        spec = self.spec
        return VisionTower(weights, spec.vision, spec.images, shard, spec.patch_embed)

    def canonical_name(self, name: str) -> str:
        return canonical_name(name)

    def harmless(self, name: str) -> bool:
        """True for a canonical name that may be passed over in silence if no layer asks for it."""
        return bool(HARMLESS.search(name)) or (self.spec.text.tied and name == "lm_head.weight")

    def projection(self, name: str) -> bool:
        """True for the canonical name of a matrix of the language model, head included, which may
        be in 8 bits for products. The tower's are not.
        """
        return PROJECTION.fullmatch(name) is not None


def canonical_name(name: str) -> str:
    """The name that layers ask for: `visual.*`, `language_model.*`, `lm_head.weight`, whatever the
    file's age calls it.
    """
    name = name.removeprefix("model.")
    if name.startswith(("visual.", "language_model.", "lm_head.")):
        return name.replace("language_model.model.", "language_model.", 1)
    return f"language_model.{name}"
