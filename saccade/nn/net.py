"""A checkpoint's network, put together from what a family has built: a vision tower and a language
model, the tower alone, or no tower.

Knows of either no more than `protocol.py` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from saccade.core.family import FamilySpec
from saccade.nn.protocol import Attention, Batch, LanguageModel, VisionNet


@dataclass(frozen=True, slots=True)
class TowerAlone:
    """Implements `TowerNet`."""

    spec: FamilySpec
    vision: VisionNet


@dataclass(frozen=True, slots=True)
class WholeNet:
    """Implements `FamilyNet`."""

    spec: FamilySpec
    vision: VisionNet
    text: LanguageModel

    @property
    def hidden(self) -> int:
        return self.text.hidden

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        return self.text(batch, attention)

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.text.logits(states)
