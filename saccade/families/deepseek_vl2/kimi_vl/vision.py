"""MoonViT, for packed images of any sizes, and the projector behind it.

Its learned positions are fitted to each image. Neighbouring values of a head are turned together,
by a patch's column and its row in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.types import Grid
from saccade.families.deepseek_vl2.kimi_vl.config import MoonConfig
from saccade.families.deepseek_vl2.kimi_vl.images import LONGEST_SIDE, PaddedRules
from saccade.kernels.reference.rotary import rotary_tables
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import PatchKernel, copy_images, fit_positions, merged_order
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.tower import (
    AxialRope,
    BlockParts,
    TowerBlock,
    axial_angles,
    load_merger,
    run_blocks,
)
from saccade.nn.transfer import send
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
THETA = 10000.0


def vision_block(weights: Weights, name: str, config: MoonConfig, shard: Shard) -> TowerBlock:
    """Load one block. Raises CheckpointError where a tensor is missing or misshapen."""
    parts = BlockParts(weights, name, config, shard)
    return TowerBlock(
        parts,
        norms=parts.norms(LayerNorm, "norm0", "norm1"),
        qkv=parts.fused_heads("wqkv"),
        out=parts.out("wo"),
        mlp=parts.mlp("mlp.fc0", "mlp.fc1"),
    )


class TakingTurns(AxialRope):
    """Rotates a head's first pair by a patch's place on one axis, its second by that on the other,
    and so on.
    """

    __slots__ = ()

    def __init__(self, weights: Weights, head_dim: int, theta: float, longest: int) -> None:
        """Build the table for `longest` places on an axis."""
        angles = axial_angles(head_dim // 2, theta, longest, weights.device)
        self.pairs = "neighbours"
        self.cos, self.sin = rotary_tables(angles.repeat_interleave(2, dim=1), self.pairs)
        self.axis = torch.arange(head_dim // 2, device=weights.device) % 2
        self.looked_up = weights.ops.looks_up


class MoonTower:
    """Turns uint8 pixels into embeddings. Implements `nn.protocol.VisionNet`."""

    __slots__ = (
        "config",
        "depth",
        "hidden",
        "kernel",
        "last_norm",
        "layers",
        "positions",
        "projector",
        "rope",
    )
    axes = 2
    longest_segments = (None,)

    def __init__(
        self, weights: Weights, config: MoonConfig, rules: PaddedRules, shard: Shard
    ) -> None:
        self.config = config
        self.depth, self.hidden = config.depth, config.hidden
        name, sizes = f"{TOWER}.patch_embed", (config.hidden, config.patch, config.merge)
        self.kernel = PatchKernel(weights, f"{name}.proj", sizes, rules.colours)
        shape = (*config.learned, config.hidden)
        self.positions = weights.load(Part(f"{name}.pos_emb.weight", shape))
        name = f"{TOWER}.encoder"
        names = (f"{name}.blocks.{i}" for i in range(config.depth))
        self.layers = [vision_block(weights, each, config, shard) for each in names]
        last = f"{name}.final_layernorm"
        self.last_norm = LayerNorm(weights, last, config.hidden, config.norm_eps)
        parts = f"{PROJECTOR}.pre_norm", f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"
        merged = config.hidden, config.merge**2, config.out_hidden
        self.projector = load_merger(weights, parts, merged, config.norm_eps, shard)
        self.rope = TakingTurns(weights, config.head_dim, THETA, LONGEST_SIDE)

    def rows(self, patches: int) -> int:
        return patches // self.config.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        height, width = grid
        device = self.positions.device
        row, column = merged_order(height, width, self.config.merge)
        return GridFacts(
            places=send(np.stack((column, row)), device),
            position_embedding=fit_positions(
                self.positions, (height, width), self.config.merge, "bicubic"
            ),
            segments=((height * width,),),
        )

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        assert facts.position_embedding is not None, "made by `grid_facts`"
        return self.kernel(pixels) + facts.position_embedding

    def blocks(self, pack: Pack) -> Pieces:
        x = yield from run_blocks(self.layers, pack, self.rope.rotation(pack.places))
        return self.projector(self.last_norm(x))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings by image, in reading order."""
        return copy_images(self, embeddings, facts)
