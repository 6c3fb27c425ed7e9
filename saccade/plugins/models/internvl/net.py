"""Builds InternVL's network, and maps tensor names to canonical ones."""

from __future__ import annotations

from saccade.nn.decoder import attention_decoder
from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.internvl.spec import InternVLSpec
from saccade.plugins.models.internvl.vision import InternVisionTower

QIANFAN = (
    (r"^vision_model\.", "vision_tower."),
    (r"^(vision_tower\.)(?:encoder\.)?layers\.", r"\1encoder.layer."),
    (r"\.ls([12])$", r".lambda_\1"),
    (r"\.attn\.qkv\.", ".attention.qkv."),
    (r"\.attn\.proj\.", ".attention.projection_layer."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.class_embedding$", ".cls_token"),
    (r"\.position_embedding$", ".position_embeddings"),
    (r"\.patch_embedding\.", ".patch_embeddings.projection."),
    (r"^mlp1\.0\.", "multi_modal_projector.layer_norm."),
    (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
    (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
    (r"^language_model\.encoder\.layers\.", "language_model.layers."),  # transformers 5.23 saves so
)
"""Renames the tensors in Qianfan-OCR's files, which have the names of the first InternVL."""


class InternVLModel(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_tower.*`,
    `multi_modal_projector.*`, `language_model.*` and `lm_head.weight`, for older and newer files
    alike.
    """

    spec: InternVLSpec

    names = (
        (r"^model\.", ""),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "language_model."),
        (r"^(?=(embed_tokens|layers|norm)\.)", "language_model."),  # as in GGUF files
        *QIANFAN,
    )
    unused = ("vision_tower.embeddings.mask_token",)  # only used in training

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return InternVisionTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return attention_decoder(weights, self.spec.text, shard)
