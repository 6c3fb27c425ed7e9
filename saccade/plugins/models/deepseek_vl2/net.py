"""Builds DeepSeek-VL2's network, and maps tensor names to canonical ones."""

from __future__ import annotations

from saccade.nn.family_model import FamilyModel
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.deepseek_vl2.spec import DeepseekSpec
from saccade.plugins.models.deepseek_vl2.vision import DeepseekTower
from saccade.plugins.models.kit.deepseek_decoder import QUANTISABLE, deepseek_decoder


class DeepseekModel(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_model.*`, `projector.*`,
    `image_newline`, `view_seperator` (the spelling on the Hub), `language_model.*` and
    `lm_head.weight`.

    The matrices that project latents to keys and values are not quantized.
    """

    spec: DeepseekSpec

    names = (
        (r"^language\.", ""),
        (r"^model\.", "language_model."),
        (r"^vision\.pos_embed", "vision_model.embeddings.position_embedding.weight"),
        (r"^vision\.patch_embed\.proj\.", "vision_model.embeddings.patch_embedding."),
        (r"^vision\.norm\.", "vision_model.post_layernorm."),
        (r"^vision\.blocks\.", "vision_model.encoder.layers."),
        (r"^vision\.", "vision_model."),
        (r"^(vision_model\..*)\.norm([12])\.", r"\1.layer_norm\2."),
        (r"^(vision_model\..*)\.attn\.qkv\.", r"\1.self_attn.qkv."),
        (r"^(vision_model\..*)\.attn\.proj\.", r"\1.self_attn.out_proj."),
    )
    quantisable = QUANTISABLE
    unused = ("vision_model.attn_pool.",)  # SigLIP's pooling head

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return DeepseekTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return deepseek_decoder(weights, self.spec.text, shard)
