"""Builds MiniCPM-V's network, and maps tensor names to canonical ones."""

from __future__ import annotations

from saccade.nn.family_model import DENSE_LAYER, FamilyModel, language_matrices
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.kit.hybrid_decoder import hybrid_model
from saccade.plugins.models.minicpm.spec import MiniCPMSpec
from saccade.plugins.models.minicpm.vision import TOWER, MiniCPMTower


class MiniCPMModel(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_tower.*`, `merger.*`,
    `language_model.*` and `lm_head.weight`.
    """

    spec: MiniCPMSpec

    names = ((r"^model\.", ""),)
    quantisable = language_matrices(
        rf"{DENSE_LAYER}|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight"
    )
    unused = ("mtp.",)  # heads that predict draft tokens

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return MiniCPMTower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return hybrid_model(weights, self.spec.text, self.spec.hybrid, shard)

    def harmless(self, name: str) -> bool:
        """Return True also for the merger within the vision encoder if this mode does not
        use it.
        """
        left_out = not self.spec.vision.halves and name.startswith(f"{TOWER}.vit_merger.")
        return left_out or super().harmless(name)
