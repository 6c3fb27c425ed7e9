"""A Gemma 3 checkpoint's network, and what its tensors are called."""

from __future__ import annotations

from saccade.families.gemma3.spec import Gemma3Spec
from saccade.families.gemma3.text import GemmaDecoder
from saccade.families.gemma3.vision import gemma3_tower
from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard


class Gemma3Model(FamilyModel):
    """Names become `vision_model.*`, `multi_modal_projector.*`, `language_model.*` and
    `lm_head.weight`, whatever the file's age calls them.
    """

    spec: Gemma3Spec

    names = (
        (r"^model\.", ""),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "language_model."),
        (r"^vision_tower\.(vision_model\.)?", "vision_model."),
        (r"^(?!(vision_model|multi_modal_projector|language_model|lm_head)\.)", "language_model."),
    )
    seeing = ("vision_model.", "multi_modal_projector.")
    unused = ("vision_model.head.",)  # SigLIP's own head

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return gemma3_tower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return GemmaDecoder(weights, self.spec.text, shard)
