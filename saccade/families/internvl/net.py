"""An InternVL checkpoint's network, and what its tensors are called."""

from __future__ import annotations

from saccade.families.internvl.spec import InternVLSpec
from saccade.families.internvl.vision import InternVisionTower
from saccade.nn.decoder import attention_decoder
from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard


class InternVLModel(FamilyModel):
    """Names become `vision_tower.*`, `multi_modal_projector.*`, `language_model.*` and
    `lm_head.weight`, whatever the file's age calls them.
    """

    spec: InternVLSpec

    names = (
        (r"^model\.", ""),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "language_model."),
        (r"^(?=(embed_tokens|layers|norm)\.)", "language_model."),  # GGUF files'
    )
    unused = ("vision_tower.embeddings.mask_token",)  # what only training looks at

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return InternVisionTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return attention_decoder(weights, self.spec.text, shard, own_head=True)
