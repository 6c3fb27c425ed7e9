"""Builds SmolVLM's network, and maps tensor names to canonical ones."""

from __future__ import annotations

import numpy as np
import torch

from saccade.nn.decoder import attention_decoder
from saccade.nn.family_model import FamilyModel
from saccade.nn.linear import Column, Linear
from saccade.nn.patches import merged_order
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.shapes import SiglipConfig
from saccade.nn.weights import Weights
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins.models.kit.siglip import SiglipTower
from saccade.plugins.models.smolvlm.images import SplitRules
from saccade.plugins.models.smolvlm.spec import SmolVLMSpec


def smolvlm_tower(
    weights: Weights, config: SiglipConfig, rules: SplitRules, shard: Shard
) -> SiglipTower:
    """Load the vision encoder.

    Raises CheckpointError if a tensor is missing or has the wrong shape.
    """
    column = Column("connector.modality_projection.proj", config.out_hidden, UNSHARDED)
    # Replicated on every rank: a sharded output would have to be gathered at once.
    project = Linear.columns(weights, [column], config.hidden * config.merge**2, bias=False)
    return SiglipTower(
        weights,
        config,
        rules.colours,
        _buckets(config),
        lambda patches: project(patches.flatten(1)),
        shard,
    )


def _buckets(config: SiglipConfig) -> torch.Tensor:
    """Return each patch's row in the table of learned positions, in merged order.

    Follows transformers, which computes it from the patch's fractional position in the tile.
    Rounding may select the row of an adjacent patch.
    """
    across = config.across
    bounds = torch.arange(1 / across, 1.0, 1 / across)
    parts = torch.arange(across, dtype=torch.float32) * (1.0 / torch.tensor(across))
    places = torch.bucketize(parts.clamp(max=1.0 - 1e-6), bounds, right=True)
    row, column = (
        torch.from_numpy(np.ascontiguousarray(each))
        for each in merged_order(across, across, config.merge)
    )
    return places[row] * across + places[column]


class SmolVLMModel(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_model.*`, `connector.*`,
    `language_model.*`, `lm_head.weight`.
    """

    spec: SmolVLMSpec

    names = (
        (r"^model\.", ""),
        (r"^text_model\.", "language_model."),
        (r"^(?=(embed_tokens|layers|norm)\.)", "language_model."),  # as in GGUF files
    )

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        return smolvlm_tower(weights, self.spec.vision, self.spec.images, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return attention_decoder(weights, self.spec.text, shard)
