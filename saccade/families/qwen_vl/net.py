"""Builds the network of Qwen-VL, and maps the names of its tensors."""

from __future__ import annotations

from typing import ClassVar

from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.families.qwen_vl.vision import VisionTower
from saccade.nn.decoder import attention_decoder
from saccade.nn.family_model import FamilyModel, language_matrices
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard


class QwenVLModel(FamilyModel):
    """Builds the network of a Qwen-VL checkpoint.

    Canonical names of tensors are `visual.*`, `language_model.*`, `lm_head.weight` and `mtp.*`. The
    names in older and newer files are converted to these.
    """

    spec: QwenVLSpec

    names: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^model\.", ""),
        (r"^language_model\.model\.", "language_model."),
        (r"^(?!(visual|language_model|lm_head|mtp)\.)", "language_model."),
    )
    quantisable = language_matrices(
        r"(self_attn|mlp|mlp\.experts\.\d+)\.[a-z]+_proj\.weight|mlp\.experts\.[a-z_]+_proj"
    )
    seeing = ("visual.",)

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        spec = self.spec
        return VisionTower(weights, spec.vision, spec.images, shard, spec.patch_embed)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return attention_decoder(weights, self.spec.text, shard)
