"""Builds PaddleOCR-VL's network, and maps tensor names to canonical ones."""

from __future__ import annotations

from saccade.nn.decoder import attention_decoder
from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.paddleocr_vl.spec import PaddleSpec
from saccade.plugins.models.paddleocr_vl.vision import FittedTower


class PaddleModel(FamilyModel):
    """Builds the network. Tensor names are converted to `visual.*`, `projector.*`,
    `language_model.*` and `lm_head.weight`, for older and newer files alike.
    """

    spec: PaddleSpec

    names = (
        (r"^model\.(?=visual\.|projector\.|language_model\.)", ""),
        (r"^mlp_AR\.", "projector."),
        (r"^model\.", "language_model."),
    )
    seeing = ("visual.", "projector.")
    # SigLIP's pooling head, and positions for images that are packed in training
    unused = (
        "visual.vision_model.head.",
        "visual.vision_model.embeddings.packing_position_embedding.",
    )

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return FittedTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return attention_decoder(weights, self.spec.text, shard)
