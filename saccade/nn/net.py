"""A checkpoint's network, put together from what a family has built: a vision tower and a language
model, the tower alone, or a language model alone.

Knows of either no more than `protocol.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    VisionNet,
)

NOTHING_SEEN = "a model without a vision tower is sent no images"
NOTHING_SAID = "a model without weights is sent no tokens"


@dataclass(frozen=True, slots=True)
class TowerAlone:
    """Implements `TowerNet`."""

    spec: FamilySpec
    ops: Ops
    vision: VisionNet
    adapters: Adapters


class NoVision:
    """A stand-in for the tower where a model has no images (`FamilySpec.sees_images`).

    Implements `VisionNet`. Images never come this far.
    """

    __slots__ = ()

    hidden = axes = depth = 0
    longest_segments: tuple[int | None, ...] = ()

    def rows(self, patches: int) -> int:
        assert not patches, NOTHING_SEEN
        return 0

    def grid_facts(self, _grid: Grid, /) -> GridFacts:
        raise AssertionError(NOTHING_SEEN)

    def embed(self, _pixels: torch.Tensor, _facts: GridFacts, /) -> torch.Tensor:
        raise AssertionError(NOTHING_SEEN)

    def blocks(self, _pack: Pack, /) -> Pieces:
        raise AssertionError(NOTHING_SEEN)

    def split(
        self, _embeddings: torch.Tensor, _facts: Sequence[GridFacts], /
    ) -> list[torch.Tensor]:
        raise AssertionError(NOTHING_SEEN)


class NoText:
    """A stand-in for a language model whose weights were given back. Implements `LanguageModel`."""

    __slots__ = ()

    hidden = 0

    def _refuse(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError(NOTHING_SAID)

    __call__ = normed = logits = _refuse


@dataclass(frozen=True, slots=True)
class WholeNet:
    """Implements `FamilyNet`."""

    spec: FamilySpec
    ops: Ops
    vision: VisionNet
    text: LanguageModel
    adapters: Adapters
    head: DraftHead | None = None

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
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.text.logits(states)


def without_weights(spec: FamilySpec, ops: Ops) -> WholeNet:
    """Return what stands in a network's place while it sleeps."""
    return WholeNet(spec, ops, NoVision(), NoText(), Adapters())
