"""Builds Step3-VL's network, and maps tensor names to canonical ones."""

from __future__ import annotations

from saccade.nn.decoder import attention_decoder
from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.step3_vl.spec import Step3VLSpec
from saccade.plugins.models.step3_vl.vision import PerceptionTower

HUB = (
    (r"^vit_large_projector\.", "multi_modal_projector."),
    (r"^vision_model\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^vision_model\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^vision_model\.ln_pre\.", "vision_model.pre_layernorm."),
    (r"^vision_model\.vit_downsampler", "vision_model.downsampler"),
    (r"^vision_model\.transformer\.resblocks\.", "vision_model.layers."),
    (r"\.attn\.in_proj_", ".self_attn.in_proj."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.ln_1\.", ".layernorm_before."),
    (r"\.ln_2\.", ".layernorm_after."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.ls_([12])\.gamma$", r".lambda_\1"),
)
"""Maps the Hub's names to the names in transformers' `step3p7`."""


class Step3VLModel(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_model.*`,
    `multi_modal_projector.*`, `language_model.*` and `lm_head.weight`.
    """

    spec: Step3VLSpec

    names = (
        (r"^model\.(?=vision_model\.|multi_modal_projector\.|language_model\.)", ""),
        (r"^model\.", "language_model."),
        *HUB,
    )

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return PerceptionTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return attention_decoder(weights, self.spec.text, shard)
