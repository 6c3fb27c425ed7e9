"""Builds dots.ocr's network, and maps tensor names to canonical ones."""

from __future__ import annotations

from saccade.nn.decoder import attention_decoder
from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.dots_ocr.spec import DotsSpec
from saccade.plugins.models.dots_ocr.vision import DotsTower


class DotsModel(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_tower.*`, `language_model.*` and
    `lm_head.weight`.
    """

    spec: DotsSpec

    names = (
        (r"^model\.", "language_model."),
        (r"^(vision_tower\.blocks\.\d+\.mlp)\.fc1\.", r"\1.gate_proj."),
        (r"^(vision_tower\.blocks\.\d+\.mlp)\.fc3\.", r"\1.up_proj."),
        (r"^(vision_tower\.blocks\.\d+\.mlp)\.fc2\.", r"\1.down_proj."),
    )

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return DotsTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return attention_decoder(weights, self.spec.text, shard)
