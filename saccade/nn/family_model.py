"""A model family's network half: how a checkpoint's network is built, and what its tensors are
called.

A family gives names and patterns as data, and makes its tower and its language model. Knows nothing
about files.
"""

from __future__ import annotations

import re
from typing import ClassVar

from saccade.core.family import FamilySpec
from saccade.nn.net import NoVision, TowerAlone, WholeNet
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

BUFFERS = re.compile(r"rotary_(pos_)?emb\.|inv_freq$|\.position_ids$|\.embed_scale$")
"""Buffers that the configuration decides anyway."""
DENSE_LAYER = r"(self_attn|mlp)\.[a-z]+_proj\.weight"
"""The matrices of a layer with attention and an MLP."""


def language_matrices(of_layer: str, *others: str) -> re.Pattern[str]:
    """Return the pattern for a language model's matrices: its embedding, its head, and each
    layer's.

    `of_layer`: the pattern for what follows a layer's number. `others`: patterns for whole names.
    """
    layers = rf"language_model\.layers\.\d+\.({of_layer})"
    ends = r"language_model\.embed_tokens\.weight", r"lm_head\.weight"
    return re.compile("|".join((layers, *ends, *others)))


class FamilyModel:
    """One checkpoint's network half. Families derive from it, and say which spec is theirs.

    names: pattern and replacement, in order, from a file's name to the layers' own (the canonical
    name). quantisable: canonical names of the matrices that may be quantised. seeing: prefixes of
    the tower's tensors, which a text-only model may carry. unused: prefixes of tensors that answers
    can do without.
    """

    spec: FamilySpec

    names: ClassVar[tuple[tuple[str, str], ...]] = ()
    quantisable: ClassVar[re.Pattern[str]] = language_matrices(DENSE_LAYER)
    seeing: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: FamilySpec) -> None:
        self.spec = spec

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        """Make the vision tower. Raises as `build` does."""
        raise NotImplementedError

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        """Make the language model. Raises as `build` does."""
        raise NotImplementedError

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
        """Build the whole network. `encoder_shard` is the vision tower's.

        Raises CheckpointError where a tensor is missing or misshapen.
        """
        tower = self.tower(weights, encoder_shard) if self.spec.sees_images else NoVision()
        text = self.text(weights, shard)
        return WholeNet(self.spec, weights.ops, tower, text, weights.adapters)

    def build_tower(self, weights: Weights, encoder_shard: Shard) -> TowerAlone:
        """Build the vision tower alone, reading only its tensors. Raises as `build` does."""
        tower = self.tower(weights, encoder_shard)
        return TowerAlone(self.spec, weights.ops, tower, weights.adapters)

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Return the layers' name for the tensor called `name` in a file."""
        for pattern, replacement in cls.names:
            name = re.sub(pattern, replacement, name, count=1)
        return name

    def harmless(self, name: str) -> bool:
        """Return True for a canonical name that may be skipped in silence if unused by layers."""
        unused = self.unused if self.spec.sees_images else self.unused + self.seeing
        return name.startswith(unused) or BUFFERS.search(name) is not None

    def projection(self, name: str) -> bool:
        """Return True for the canonical name of a matrix that may be quantised."""
        return self.quantisable.fullmatch(name) is not None
