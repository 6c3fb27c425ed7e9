"""An InternVL checkpoint's network, and what its tensors are called."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from saccade.families.internvl.spec import InternVLSpec
from saccade.families.internvl.vision import InternVisionTower
from saccade.nn.decoder import attention_decoder
from saccade.nn.net import TowerAlone, WholeNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

HEAD = "lm_head.weight"
HARMLESS = re.compile(r"rotary_emb\.|\.inv_freq$|vision_tower\.embeddings\.mask_token$")
"""Buffers that the configuration decides anyway, and what only training looks at."""
PROJECTION = re.compile(
    r"language_model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.weight"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight"
)


@dataclass(frozen=True, slots=True)
class InternVLModel:
    """Implements `nn.protocol.FamilyModel`."""

    spec: InternVLSpec

    def build_tower(self, weights: Weights, encoder_shard: Shard) -> TowerAlone:
        """The vision tower alone; no other tensor is read. Raises as `build` does."""
        tower = InternVisionTower(weights, self.spec.vision, self.spec.images, encoder_shard)
        return TowerAlone(self.spec, weights.ops, tower, weights.adapters)

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
        """`encoder_shard` is the vision tower's.

        Raises CheckpointError where a tensor is missing or misshapen.
        """
        tower = InternVisionTower(weights, self.spec.vision, self.spec.images, encoder_shard)
        # Older files do not say that they are not tied: a head of the file's own counts.
        tied = self.spec.text.tied and not weights.has(HEAD)
        text = attention_decoder(weights, replace(self.spec.text, tied=tied), shard)
        return WholeNet(self.spec, weights.ops, tower, text, weights.adapters)

    def canonical_name(self, name: str) -> str:
        """The name that layers ask for: `vision_tower.*`, `multi_modal_projector.*`,
        `language_model.*`, `lm_head.weight`, whatever the file's age calls it.
        """
        name = name.removeprefix("model.").replace("language_model.lm_head.", "lm_head.", 1)
        return name.replace("language_model.model.", "language_model.", 1)

    def harmless(self, name: str) -> bool:
        """True for a canonical name that may be passed over in silence if no layer asks for it."""
        return HARMLESS.search(name) is not None

    def projection(self, name: str) -> bool:
        """True for the canonical name of a matrix of the language model's layers, which may be
        quantised. The head, the tower and the projector are not.
        """
        return PROJECTION.fullmatch(name) is not None
