"""The network of an InternVL checkpoint: vision tower and language model behind
`nn.protocol.FamilyNet`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from saccade.families.internvl.spec import InternVLSpec
from saccade.families.internvl.vision import InternVisionTower
from saccade.families.qwen_vl.text import TextModel
from saccade.nn.protocol import Attention, Batch
from saccade.nn.weights import Weights
from saccade.parallel import Shard

HEAD = "lm_head.weight"
HARMLESS = re.compile(r"rotary_emb\.|\.inv_freq$|vision_tower\.embeddings\.mask_token$")
"""Buffers that the configuration decides anyway, and what only training looks at."""
PROJECTION = re.compile(
    r"language_model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.weight"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight"
)


class InternVLNet:
    """Implements `FamilyNet`."""

    def __init__(
        self, spec: InternVLSpec, weights: Weights, shard: Shard, encoder_shard: Shard
    ) -> None:
        self.spec = spec
        self.vision = InternVisionTower(weights, spec.vision, spec.tiles, encoder_shard)
        # Older files do not say that they are not tied: a head of the file's own counts.
        tied = spec.text.tied and not weights.has(HEAD)
        self.text = TextModel(weights, replace(spec.text, tied=tied), shard)

    @property
    def hidden(self) -> int:
        return self.text.config.hidden

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        return self.text(batch, attention)

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.text.logits(states)


class InternVLTower:
    """Implements `TowerNet`."""

    def __init__(self, spec: InternVLSpec, vision: InternVisionTower) -> None:
        self.spec = spec
        self.vision = vision


def build_tower(spec: InternVLSpec, weights: Weights, encoder_shard: Shard) -> InternVLTower:
    """The vision tower alone; no other tensor is read. Raises as `build` does."""
    return InternVLTower(spec, InternVisionTower(weights, spec.vision, spec.tiles, encoder_shard))


def build(spec: InternVLSpec, weights: Weights, shard: Shard, encoder_shard: Shard) -> InternVLNet:
    """`encoder_shard` is the vision tower's.

    Raises CheckpointError where a tensor is missing or misshapen.
    """
    return InternVLNet(spec, weights, shard, encoder_shard)


def canonical_name(name: str) -> str:
    """The name that layers ask for: `vision_tower.*`, `multi_modal_projector.*`,
    `language_model.*`, `lm_head.weight`, whatever the file's age calls it.
    """
    name = name.removeprefix("model.").replace("language_model.lm_head.", "lm_head.", 1)
    return name.replace("language_model.model.", "language_model.", 1)


def harmless(name: str, _spec: InternVLSpec) -> bool:
    """Whether a canonical name that no layer asks for may be passed over in silence."""
    return HARMLESS.search(name) is not None


def projection(name: str) -> bool:
    """Whether a canonical name is that of a matrix of the language model's layers, which may be
    quantised. The head, the tower and the projector are not.
    """
    return PROJECTION.fullmatch(name) is not None
