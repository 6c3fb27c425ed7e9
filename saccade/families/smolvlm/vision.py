"""SmolVLM's SigLIP: where its patches find their learned positions, and the connector."""

from __future__ import annotations

import numpy as np
import torch

from saccade.families.smolvlm.images import SplitRules
from saccade.nn.linear import Column, Linear
from saccade.nn.patches import merged_order
from saccade.nn.siglip import SiglipTower
from saccade.nn.siglip_config import SiglipConfig
from saccade.nn.weights import Weights
from saccade.parallel import WHOLE, Shard


def smolvlm_tower(
    weights: Weights, config: SiglipConfig, rules: SplitRules, shard: Shard
) -> SiglipTower:
    """Build the tower.

    Raises CheckpointError where a tensor is missing or misshapen.
    """
    column = Column("connector.modality_projection.proj", config.out_hidden, WHOLE)
    # Every rank has it whole: a share would be gathered again at once.
    project = Linear.columns(weights, [column], config.hidden * config.merge**2, bias=False)
    return SiglipTower(
        weights,
        config,
        (rules.mean, rules.std),
        _buckets(config),
        lambda patches: project(patches.flatten(1)),
        shard,
    )


def _buckets(config: SiglipConfig) -> torch.Tensor:
    """Return each patch's row in the table of learned positions, in merged order.

    Found as transformers finds it: by a fraction of the tile, whose rounding may give a patch its
    neighbour's.
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
