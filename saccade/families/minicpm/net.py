"""A MiniCPM-V 4.6 checkpoint's network, and what its tensors are called."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from saccade.families.minicpm.spec import MiniCPMSpec
from saccade.families.minicpm.vision import TOWER, MiniCPMTower
from saccade.nn.hybrid import hybrid_model
from saccade.nn.net import TowerAlone, WholeNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

HEAD = "lm_head.weight"
HARMLESS = re.compile(r"rotary_emb\.|\.inv_freq$|\.position_ids$|^mtp\.")
"""Buffers that the configuration decides anyway, and heads that draft."""
PROJECTION = re.compile(
    r"language_model\.layers\.\d+\."
    r"((self_attn|mlp)\.[a-z]+_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))\.weight"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight"
)


@dataclass(frozen=True, slots=True)
class MiniCPMModel:
    """Implements `nn.protocol.FamilyModel`."""

    spec: MiniCPMSpec

    def build_tower(self, weights: Weights, encoder_shard: Shard) -> TowerAlone:
        """The vision tower alone; no other tensor is read. Raises as `build` does."""
        tower = MiniCPMTower(weights, self.spec.vision, self.spec.images, encoder_shard)
        return TowerAlone(self.spec, weights.ops, tower, weights.adapters)

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
        """`encoder_shard` is the vision tower's.

        Raises CheckpointError where a tensor is missing or misshapen.
        """
        tower = MiniCPMTower(weights, self.spec.vision, self.spec.images, encoder_shard)
        tied = self.spec.text.tied and not weights.has(HEAD)
        config = replace(self.spec.text, tied=tied)
        text = hybrid_model(weights, config, self.spec.hybrid, shard)
        return WholeNet(self.spec, weights.ops, tower, text, weights.adapters)

    def canonical_name(self, name: str) -> str:
        """The name that layers ask for: `vision_tower.*`, `merger.*`, `language_model.*`,
        `lm_head.weight`.
        """
        return name.removeprefix("model.")

    def harmless(self, name: str) -> bool:
        """True for a canonical name that may be passed over in silence if no layer asks for it."""
        unused = not self.spec.vision.halves and name.startswith(f"{TOWER}.vit_merger.")
        return unused or HARMLESS.search(name) is not None

    def projection(self, name: str) -> bool:
        """True for the canonical name of a matrix of the language model, head included, which may
        be in 8 bits for products. The tower's are not.
        """
        return PROJECTION.fullmatch(name) is not None
