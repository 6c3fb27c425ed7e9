"""A PaddleOCR-VL checkpoint's network, and what its tensors are called."""

from __future__ import annotations

from saccade.nn.decoder import attention_decoder
from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.paddleocr_vl.spec import PaddleSpec
from saccade.plugins.models.paddleocr_vl.vision import FittedTower


class PaddleModel(FamilyModel):
    """Names become `visual.*`, `projector.*`, `language_model.*` and `lm_head.weight`, whatever the
    file's age calls them.
    """

    spec: PaddleSpec

    names = (
        (r"^model\.(?=visual\.|projector\.|language_model\.)", ""),
        (r"^mlp_AR\.", "projector."),
        (r"^model\.", "language_model."),
    )
    seeing = ("visual.", "projector.")
    # of SigLIP, and of images packed to one length in training
    unused = (
        "visual.vision_model.head.",
        "visual.vision_model.embeddings.packing_position_embedding.",
    )

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return FittedTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return attention_decoder(weights, self.spec.text, shard)
