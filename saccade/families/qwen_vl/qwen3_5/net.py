"""A Qwen3.5 checkpoint's network, and what its tensors are called. The vision tower is
Qwen3-VL's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from saccade.families.qwen_vl.net import HARMLESS, QwenVLModel, canonical_name
from saccade.families.qwen_vl.qwen3_5.head import NAME, MultiTokenHead
from saccade.families.qwen_vl.qwen3_5.spec import Qwen35Spec
from saccade.nn.hybrid import hybrid_model
from saccade.nn.net import NoVision, TowerAlone, WholeNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

DRAFTING = f"{NAME}."
"""Heads that draft: loaded if asked for."""
PROJECTION = re.compile(
    r"(language_model|mtp)\.layers\.\d+\."
    r"(((self_attn|mlp|mlp\.shared_expert|mlp\.experts\.\d+)\.[a-z]+_proj"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))\.weight|mlp\.experts\.[a-z_]+_proj)"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight|mtp\.fc\.weight"
)


@dataclass(frozen=True, slots=True)
class Qwen35Model:
    """Implements `nn.protocol.FamilyModel`."""

    spec: Qwen35Spec

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
        """`encoder_shard` is the vision tower's.

        Raises CheckpointError where a tensor is missing or misshapen.
        """
        tower = (
            self.build_tower(weights, encoder_shard).vision if self.spec.sees_images else NoVision()
        )
        text = hybrid_model(weights, self.spec.text, self.spec.hybrid, shard)
        config, hybrid = self.spec.text, self.spec.hybrid
        drafts = self.spec.drafts
        head = MultiTokenHead(weights, config, hybrid, shard, text) if drafts else None
        return WholeNet(self.spec, weights.ops, tower, text, weights.adapters, head)

    def build_tower(self, weights: Weights, encoder_shard: Shard) -> TowerAlone:
        """The vision tower alone, which is Qwen3-VL's."""
        return QwenVLModel(self.spec).build_tower(weights, encoder_shard)

    def canonical_name(self, name: str) -> str:
        """Qwen-VL's; heads that draft keep theirs."""
        return name if name.startswith(DRAFTING) else canonical_name(name)

    def harmless(self, name: str) -> bool:
        """True for a canonical name that may be passed over in silence if no layer asks for it."""
        return (
            name.startswith(DRAFTING if self.spec.sees_images else (DRAFTING, "visual."))
            or bool(HARMLESS.search(name))
            or (self.spec.text.tied and name == "lm_head.weight")
        )

    def projection(self, name: str) -> bool:
        """True for the canonical name of a matrix of the language model, head included, which may
        be in 8 bits for products.
        """
        return PROJECTION.fullmatch(name) is not None
