"""A Gemma 4 checkpoint's network, and what its tensors are called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from saccade.families.gemma4.spec import Gemma4Spec
from saccade.families.gemma4.text import Gemma4Decoder
from saccade.families.gemma4.vision import Gemma4Tower
from saccade.nn.net import NoVision, TowerAlone, WholeNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

HEAD = "lm_head.weight"
SEEING = ("vision_tower.", "embed_vision.")
HEARING = ("audio_tower.", "embed_audio.")
HARMLESS = re.compile(r"rotary_emb\.|inv_freq$|\.embed_scale$")
"""Buffers that the configuration decides anyway."""
UNUSED_KEYS = re.compile(r"language_model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")
"""What layers that see another layer's keys have in some files."""
PROJECTION = re.compile(
    r"language_model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.weight"
    r"|language_model\.layers\.\d+\.experts\.(gate_up|down)_proj"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight"
)


@dataclass(frozen=True, slots=True)
class Gemma4Model:
    """Implements `nn.protocol.FamilyModel`."""

    spec: Gemma4Spec

    def build_tower(self, weights: Weights, encoder_shard: Shard) -> TowerAlone:
        """The vision tower alone; no other tensor is read. Raises as `build` does."""
        tower = Gemma4Tower(weights, self.spec.vision, encoder_shard)
        return TowerAlone(self.spec, weights.ops, tower, weights.adapters)

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
        """`encoder_shard` is the vision tower's.

        Raises CheckpointError where a tensor is missing or misshapen.
        """
        tower = (
            self.build_tower(weights, encoder_shard).vision if self.spec.sees_images else NoVision()
        )
        tied = self.spec.text.tied and not weights.has(HEAD)
        text = Gemma4Decoder(weights, self.spec.text, shard, tied=tied)
        return WholeNet(self.spec, weights.ops, tower, text, weights.adapters)

    def canonical_name(self, name: str) -> str:
        """The name that layers ask for: `vision_tower.*`, `embed_vision.*`, `language_model.*`,
        `lm_head.weight`.
        """
        name = name.removeprefix("model.")
        if name.startswith((*SEEING, *HEARING, "language_model.", "lm_head.")):
            return name
        return f"language_model.{name}"

    def harmless(self, name: str) -> bool:
        """True for a canonical name that may be passed over in silence if no layer asks for it:
        here no sound is heard.
        """
        if found := UNUSED_KEYS.match(name):
            layer, layers = int(found[1]), self.spec.text.layers
            return layer < len(layers) and layers[layer].source != layer
        blind = not self.spec.sees_images and name.startswith(SEEING)
        return blind or name.startswith(HEARING) or HARMLESS.search(name) is not None

    def projection(self, name: str) -> bool:
        """True for the canonical name of a matrix of the language model's layers, or of its head,
        which may be quantised. The tower and embeddings by layer are not.
        """
        return PROJECTION.fullmatch(name) is not None
