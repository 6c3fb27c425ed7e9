"""Gemma 3's SigLIP and the projector behind it: patches are averaged to tokens, normalised, and
multiplied.
"""

from __future__ import annotations

import torch

from saccade.families.gemma3.images import SquareRules
from saccade.kernels.matrix import DenseMatrix
from saccade.nn.linear import Linear
from saccade.nn.norm import RMSNorm
from saccade.nn.patches import merged_order
from saccade.nn.siglip import SiglipTower
from saccade.nn.siglip_config import SiglipConfig
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard

PROJECTOR = "multi_modal_projector"


class MeanProjector:
    """Averages patches into tokens and projects them. Every rank has the whole projector."""

    __slots__ = ("norm", "project")

    def __init__(self, weights: Weights, config: SiglipConfig) -> None:
        name, sizes = f"{PROJECTOR}.mm_soft_emb_norm", (config.hidden, config.norm_eps)
        self.norm = RMSNorm(weights, name, *sizes, around_one=True)
        shape = (config.hidden, config.out_hidden)
        matrix = weights.load(Part(f"{PROJECTOR}.mm_input_projection_weight", shape))
        self.project = Linear(weights.ops, DenseMatrix(matrix.t().contiguous()))

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Map [M, merge^2, hidden] to [M, out]."""
        return self.project(self.norm(patches.mean(1)))


def gemma3_tower(
    weights: Weights, config: SiglipConfig, rules: SquareRules, shard: Shard
) -> SiglipTower:
    """Build the tower.

    Raises CheckpointError where a tensor is missing or misshapen.
    """
    row, column = merged_order(config.across, config.across, config.merge)
    order = torch.from_numpy(row * config.across + column)
    return SiglipTower(weights, config, rules.colours, order, MeanProjector(weights, config), shard)
