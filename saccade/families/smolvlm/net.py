"""A SmolVLM checkpoint's network, and what its tensors are called."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from saccade.families.smolvlm.spec import SmolVLMSpec
from saccade.families.smolvlm.vision import smolvlm_tower
from saccade.nn.decoder import attention_decoder
from saccade.nn.net import TowerAlone, WholeNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

HEAD = "lm_head.weight"
HARMLESS = re.compile(r"rotary_emb\.|\.inv_freq$|\.position_ids$")
"""Buffers that the configuration decides anyway."""
PROJECTION = re.compile(
    r"language_model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.weight"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight"
)


@dataclass(frozen=True, slots=True)
class SmolVLMModel:
    """Implements `nn.protocol.FamilyModel`."""

    spec: SmolVLMSpec

    def build_tower(self, weights: Weights, encoder_shard: Shard) -> TowerAlone:
        """The vision tower alone; no other tensor is read. Raises as `build` does."""
        tower = smolvlm_tower(weights, self.spec.vision, self.spec.images, encoder_shard)
        return TowerAlone(self.spec, weights.ops, tower, weights.adapters)

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
        """`encoder_shard` is the vision tower's.

        Raises CheckpointError where a tensor is missing or misshapen.
        """
        tower = smolvlm_tower(weights, self.spec.vision, self.spec.images, encoder_shard)
        tied = self.spec.text.tied and not weights.has(HEAD)
        text = attention_decoder(weights, replace(self.spec.text, tied=tied), shard)
        return WholeNet(self.spec, weights.ops, tower, text, weights.adapters)

    def canonical_name(self, name: str) -> str:
        """The name that layers ask for: `vision_model.*`, `connector.*`, `language_model.*`,
        `lm_head.weight`.
        """
        name = name.removeprefix("model.")
        return name.replace("text_model.", "language_model.", 1)

    def harmless(self, name: str) -> bool:
        """True for a canonical name that may be passed over in silence if no layer asks for it."""
        return HARMLESS.search(name) is not None

    def projection(self, name: str) -> bool:
        """True for the canonical name of a matrix of the language model's layers, which may be
        quantised. The head, the tower and the connector are not.
        """
        return PROJECTION.fullmatch(name) is not None
