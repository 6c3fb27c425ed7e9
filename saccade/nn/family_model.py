"""Builds the network of a model family from a checkpoint, and maps the names of its tensors.

A family provides names and patterns as data, and builds its vision encoder and its language model.
`FullNet` and `VisionOnlyNet` combine them to the networks that workers run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.kernels.reference.ops import Ops
from saccade.nn.low_rank import Adapters
from saccade.nn.protocol import (
    Attention,
    Batch,
    DraftHead,
    GridFacts,
    LanguageModel,
    Pack,
    Pieces,
    TokenVectors,
    VisionNet,
)
from saccade.nn.weights import Weights
from saccade.parallel import Shard

if TYPE_CHECKING:
    from saccade.kernels.reference.low_rank import AdapterRows

NO_IMAGES = "a model without a vision encoder is sent no images"
NO_LOGITS = "a model without weights is sent no tokens"


@dataclass(frozen=True, slots=True)
class VisionOnlyNet:
    """The network of a server that only encodes images. Implements `TowerNet`."""

    spec: FamilySpec
    ops: Ops
    vision: VisionNet
    adapters: Adapters


class NoVision:
    """Replaces the vision encoder of a text-only model (`FamilySpec.sees_images`).

    Implements `VisionNet`, but its methods must not be called, because requests contain no images.
    """

    __slots__ = ()

    hidden = axes = depth = 0
    longest_segments: tuple[int | None, ...] = ()

    def rows(self, patches: int) -> int:
        assert not patches, NO_IMAGES
        return 0

    def grid_facts(self, _grid: Grid, /) -> GridFacts:
        raise AssertionError(NO_IMAGES)

    def embed(self, _pixels: torch.Tensor, _facts: GridFacts, /) -> torch.Tensor:
        raise AssertionError(NO_IMAGES)

    def blocks(self, _pack: Pack, /) -> Pieces:
        raise AssertionError(NO_IMAGES)

    def split(
        self, _embeddings: torch.Tensor, _facts: Sequence[GridFacts], /
    ) -> list[torch.Tensor]:
        raise AssertionError(NO_IMAGES)


class NoText:
    """Replaces a language model whose weights were released. Implements `LanguageModel`, but must
    not be called.
    """

    __slots__ = ()

    hidden = 0

    def _refuse(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError(NO_LOGITS)

    __call__ = normed = logits = _refuse


@dataclass(frozen=True, slots=True)
class FullNet:
    """A vision encoder, a language model and their optional heads. Implements `FamilyNet`."""

    spec: FamilySpec
    ops: Ops
    vision: VisionNet
    text: LanguageModel
    adapters: Adapters
    head: DraftHead | None = None
    vectors: TokenVectors | None = None

    @property
    def hidden(self) -> int:
        return self.text.hidden

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        if not batch.adapters:
            return self.text(batch, attention)
        with self.adapters.language.assign(batch.adapters):
            return self.text(batch, attention)

    @torch.inference_mode()
    def normed(self, states: torch.Tensor) -> torch.Tensor:
        return self.text.normed(states)

    @torch.inference_mode()
    def readout(self, states: torch.Tensor, adapters: Sequence[AdapterRows] = ()) -> torch.Tensor:
        states = self.text.normed(states)
        if self.vectors is None:
            return states.float()
        with self.adapters.language.assign(adapters):
            return self.vectors(states)

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.text.logits(states)


def without_weights(spec: FamilySpec, ops: Ops) -> FullNet:
    """Return a placeholder for the network of a model whose weights were released."""
    return FullNet(spec, ops, NoVision(), NoText(), Adapters())


BUFFERS = re.compile(r"rotary_(pos_)?emb\.|inv_freq$|\.position_ids$|\.embed_scale$")
"""Buffers that are computed from the configuration instead of loaded."""
DENSE_LAYER = r"(self_attn|mlp)\.[a-z]+_proj\.weight"
"""The matrices of a decoder layer with attention and an MLP."""


def language_matrices(of_layer: str, *others: str) -> re.Pattern[str]:
    """Return a pattern for the names of a language model's matrices.

    It matches the embedding, the head and the matrices of layers.

    of_layer: a pattern for the rest of a name after the layer's index.
    others: patterns for entire names.
    """
    layers = rf"language_model\.layers\.\d+\.({of_layer})"
    ends = r"language_model\.embed_tokens\.weight", r"lm_head\.weight"
    return re.compile("|".join((layers, *ends, *others)))


class FamilyModel:
    """Builds the network of one checkpoint. Families derive from it and set `spec`."""

    spec: FamilySpec

    # (pattern, replacement), applied in order, which map a file's tensor names to canonical names
    names: ClassVar[tuple[tuple[str, str], ...]] = ()
    # canonical names of the matrices that may be quantized
    quantisable: ClassVar[re.Pattern[str]] = language_matrices(DENSE_LAYER)
    # prefixes of the vision encoder's tensors, which a text-only checkpoint may contain
    seeing: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[tuple[str, ...]] = ()  # prefixes of tensors that are not needed for inference

    def __init__(self, spec: FamilySpec) -> None:
        self.spec = spec

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        """Build the vision encoder.

        Raises CheckpointError if a tensor is missing or has the wrong shape.
        """
        raise NotImplementedError

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        """Build the language model.

        Raises CheckpointError if a tensor is missing or has the wrong shape.
        """
        raise NotImplementedError

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> FullNet:
        """Build the network, with the vision encoder sharded by `encoder_shard`.

        Raises CheckpointError if a tensor is missing or has the wrong shape.
        """
        tower = self.tower(weights, encoder_shard) if self.spec.sees_images else NoVision()
        text = self.text(weights, shard)
        return FullNet(self.spec, weights.ops, tower, text, weights.adapters)

    def build_tower(self, weights: Weights, encoder_shard: Shard) -> VisionOnlyNet:
        """Build only the vision encoder, reading only its tensors.

        Raises CheckpointError if a tensor is missing or has the wrong shape.
        """
        tower = self.tower(weights, encoder_shard)
        return VisionOnlyNet(self.spec, weights.ops, tower, weights.adapters)

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Return the canonical name of the tensor that a file calls `name`."""
        for pattern, replacement in cls.names:
            name = re.sub(pattern, replacement, name, count=1)
        return name

    def harmless(self, name: str) -> bool:
        """Return True if a tensor may be ignored without a warning when no layer uses it."""
        unused = self.unused if self.spec.sees_images else self.unused + self.seeing
        return name.startswith(unused) or BUFFERS.search(name) is not None

    def projection(self, name: str) -> bool:
        """Return True if `name` is the canonical name of a matrix that may be quantized."""
        return self.quantisable.fullmatch(name) is not None
