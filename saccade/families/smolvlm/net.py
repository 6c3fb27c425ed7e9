"""A SmolVLM checkpoint's network, and what its tensors are called."""

from __future__ import annotations

from saccade.families.smolvlm.spec import SmolVLMSpec
from saccade.families.smolvlm.vision import smolvlm_tower
from saccade.nn.decoder import attention_decoder
from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard


class SmolVLMModel(FamilyModel):
    """Names become `vision_model.*`, `connector.*`, `language_model.*` and `lm_head.weight`."""

    spec: SmolVLMSpec

    names = ((r"^model\.", ""), (r"^text_model\.", "language_model."))

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return smolvlm_tower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return attention_decoder(weights, self.spec.text, shard, own_head=True)
