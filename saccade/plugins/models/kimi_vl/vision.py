"""MoonViT, for packed images of any size, and its projector.

The learned positions are interpolated to the size of each image. Adjacent values of a head are
rotated as a pair, alternately by a patch's column and its row.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from saccade.core.types import Grid
from saccade.kernels.reference.rotary import rotary_tables
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import PatchKernel, fit_positions
from saccade.nn.protocol import GridFacts
from saccade.nn.tower import (
    AxialRope,
    BlockParts,
    TowerBlock,
    axial_angles,
    load_merger,
)
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.kimi_vl.config import MoonConfig
from saccade.plugins.models.kimi_vl.images import MAX_SIDE, PaddedRules
from saccade.plugins.models.kit.axial_tower import AxialTower

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
THETA = 10000.0


def vision_block(weights: Weights, name: str, config: MoonConfig, shard: Shard) -> TowerBlock:
    """Load one block. Raises CheckpointError if a tensor is missing or has another shape."""
    parts = BlockParts(weights, name, config, shard)
    return TowerBlock(
        parts,
        norms=parts.norms(LayerNorm, "norm0", "norm1"),
        qkv=parts.fused_heads("wqkv"),
        out=parts.out("wo"),
        mlp=parts.mlp("mlp.fc0", "mlp.fc1"),
    )


class TakingTurns(AxialRope):
    """Rotates the pairs of values of a head alternately: the first by a patch's position on one
    axis, the second by its position on the other axis, and so on.
    """

    __slots__ = ()

    def __init__(self, weights: Weights, head_dim: int, theta: float, longest: int) -> None:
        """Compute the table of rotations for `longest` positions per axis."""
        angles = axial_angles(head_dim // 2, theta, longest, weights.device)
        self.pairs = "neighbours"
        self.cos, self.sin = rotary_tables(angles.repeat_interleave(2, dim=1), self.pairs)
        # The column rotates the first pair.
        self.axis = 1 - torch.arange(head_dim // 2, device=weights.device) % 2
        self.looked_up = weights.ops.looks_up


class MoonTower(AxialTower):
    """Encodes uint8 pixels to embeddings with MoonViT and its projector."""

    __slots__ = ("positions",)

    def __init__(
        self, weights: Weights, config: MoonConfig, rules: PaddedRules, shard: Shard
    ) -> None:
        name, sizes = f"{TOWER}.patch_embed", (config.hidden, config.patch, config.merge)
        kernel = PatchKernel(weights, f"{name}.proj", sizes, rules.colours)
        shape = (*config.learned, config.hidden)
        self.positions = weights.load(Part(f"{name}.pos_emb.weight", shape))
        name = f"{TOWER}.encoder"
        names = (f"{name}.blocks.{i}" for i in range(config.depth))
        layers = [vision_block(weights, each, config, shard) for each in names]
        last = f"{name}.final_layernorm"
        last_norm = LayerNorm(weights, last, config.hidden, config.norm_eps)
        parts = f"{PROJECTOR}.pre_norm", f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"
        merged = config.hidden, config.merge**2, config.out_hidden
        projector = load_merger(weights, parts, merged, config.norm_eps, shard)
        rope = TakingTurns(weights, config.head_dim, THETA, MAX_SIDE)
        super().__init__(config, kernel, layers, last_norm, projector, rope)

    def grid_facts(self, grid: Grid) -> GridFacts:
        height, width = grid
        fitted = fit_positions(self.positions, (height, width), self.merge, "bicubic")
        return replace(super().grid_facts(grid), position_embedding=fitted)
