"""Builds Kimi-VL's network, and maps tensor names to canonical ones."""

from __future__ import annotations

from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.kimi_vl.spec import KimiSpec
from saccade.plugins.models.kimi_vl.vision import MoonTower
from saccade.plugins.models.kit.deepseek_decoder import QUANTISABLE, deepseek_decoder


class KimiModel(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_tower.*`,
    `multi_modal_projector.*`, `language_model.*` and `lm_head.weight`.
    """

    spec: KimiSpec

    names = (
        (r"^language_model\.(?=lm_head\.)", ""),
        (r"^language_model\.model\.", "language_model."),
    )
    quantisable = QUANTISABLE

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return MoonTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return deepseek_decoder(weights, self.spec.text, shard)
