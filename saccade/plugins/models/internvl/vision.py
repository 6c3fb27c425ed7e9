"""InternViT and its projector, for packed tiles from any number of images.

Each tile is a segment: a class token, then its patches. The merge x merge patches of a token are
contiguous, so that pixel shuffle is a view. Callers keep track of which image a tile is from.
"""

from __future__ import annotations

import numpy as np
import torch

from saccade.core.types import Grid
from saccade.kernels.device import send
from saccade.nn.linear import Linear, share
from saccade.nn.mlp import MLP
from saccade.nn.norm import LayerNorm, RMSNorm
from saccade.nn.patches import PatchKernel, merged_order
from saccade.nn.protocol import GridFacts
from saccade.nn.tower import BlockParts, Norm, PatchMerger, ScaledBlock
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.internvl.config import InternVisionConfig
from saccade.plugins.models.internvl.images import TileRules
from saccade.plugins.models.kit.tile_tower import TileTower

TOWER = "vision_tower"
PROJECTOR = "multi_modal_projector"
PROJECTOR_EPS = 1e-5
QK_NORM_EPS = 1e-6


class WideNorm:
    """RMS norm over the values of all heads, which are distributed over the ranks."""

    __slots__ = ("hidden", "ops", "shard", "weight")

    def __init__(self, weights: Weights, name: str, hidden: int, shard: Shard) -> None:
        mine = share(shard, 0, hidden, f"values of {name}")
        self.weight = weights.load(Part(f"{name}.weight", (hidden,), (mine,)))
        self.hidden = hidden
        self.ops = weights.ops
        self.shard = shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [N, hidden / ranks]."""
        if self.shard.size == 1:
            return self.ops.rms_norm(x, self.weight, QK_NORM_EPS)
        wide = x.float()
        squares = self.shard.all_reduce(wide.square().sum(1, keepdim=True))
        return self.weight * (wide * torch.rsqrt(squares / self.hidden + QK_NORM_EPS)).to(x.dtype)


class NormedHeads:
    """Computes queries, keys and values, and normalizes queries and keys."""

    __slots__ = ("norms", "product")

    def __init__(self, parts: BlockParts, part: str, product: Linear) -> None:
        self.product = product
        names = [f"{parts.name}.{part}.{each}_norm" for each in "qk"]
        hidden = parts.config.hidden
        self.norms = [WideNorm(parts.weights, name, hidden, parts.shard) for name in names]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [n, hidden] to [n, 3 hidden / ranks]."""
        qkv = self.product(rows)
        for part, norm in zip(qkv.chunk(3, dim=1), self.norms):
            part.copy_(norm(part))
        return qkv


def intern_block(
    weights: Weights, name: str, config: InternVisionConfig, shard: Shard
) -> ScaledBlock:
    """Load one block. Raises CheckpointError if a tensor is missing or has another shape."""
    parts = BlockParts(weights, name, config, shard)
    norm: type[Norm] = LayerNorm if config.norm == "layer_norm" else RMSNorm
    norms = parts.norms(norm, "layernorm_before", "layernorm_after")
    if config.fused:
        heads = parts.fused_heads("attention.qkv")
    else:
        heads = parts.separate_heads("attention", bias=config.qkv_bias)
    return ScaledBlock(
        parts,
        norms=norms,
        qkv=NormedHeads(parts, "attention", heads) if config.qk_norm else heads,
        out=parts.out("attention.projection_layer"),
        mlp=parts.mlp(),
    )


class TileEmbed:
    """Embeds tiles as rows: one for the class token and one per patch, with learned positions
    added.
    """

    __slots__ = ("config", "first", "kernel", "positions")

    def __init__(self, weights: Weights, config: InternVisionConfig, rules: TileRules) -> None:
        name, hidden = f"{TOWER}.embeddings", config.hidden
        self.config = config
        self.first = weights.load(Part(f"{name}.cls_token", (1, 1, hidden)))
        kernel, sizes = f"{name}.patch_embeddings.projection", (hidden, config.patch, config.merge)
        self.kernel = PatchKernel(weights, kernel, sizes, rules.colours)
        table = weights.load(Part(f"{name}.position_embeddings", (1, config.rows, hidden)))[0]
        across = config.side // config.patch
        row, column = merged_order(across, across, config.merge)
        order = send(np.concatenate(([0], 1 + row * across + column)), weights.device)
        self.positions = table.index_select(0, order)  # [rows, hidden]

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map pixels, uint8 [tiles * side, side, 3], to [tiles * rows, hidden]."""
        config = self.config
        patches = self.kernel(pixels).view(-1, config.patches, config.hidden)
        rows = torch.cat((self.first.expand(len(patches), -1, -1), patches), dim=1)
        rows += self.positions
        return rows.view(-1, config.hidden)


def intern_projector(weights: Weights, config: InternVisionConfig, shard: Shard) -> PatchMerger:
    """Load the projector. Raises CheckpointError if a tensor is missing or has another shape."""
    unit, out = config.merge**2, config.out_hidden
    merged = config.hidden * unit
    norm = LayerNorm(weights, f"{PROJECTOR}.layer_norm", merged, PROJECTOR_EPS)
    names = f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"
    mlp = MLP(weights, names, (merged, out, out), config.projector_activation, shard)
    return PatchMerger(unit, norm, mlp, late=True)


class InternVisionTower(TileTower):
    """Encodes tiles with InternViT and its projector. Implements `nn.protocol.VisionNet`."""

    __slots__ = ("norm", "projector", "tile_embed")

    config: InternVisionConfig

    def __init__(
        self, weights: Weights, config: InternVisionConfig, rules: TileRules, shard: Shard
    ) -> None:
        self.tile_embed = TileEmbed(weights, config, rules)
        names = (f"{TOWER}.encoder.layer.{i}" for i in range(config.depth))
        layers = [intern_block(weights, name, config, shard) for name in names]
        super().__init__(config, weights.device, layers)
        self.norm: LayerNorm | None = None
        if config.final_norm:
            name = f"{TOWER}.layernorm"
            self.norm = LayerNorm(weights, name, config.hidden, config.norm_eps)
        self.projector = intern_projector(weights, config, shard)

    def grid_facts(self, grid: Grid) -> GridFacts:
        (tiles,) = grid
        return self.tile_facts(tiles)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        rows = self.tile_embed(pixels)
        assert len(rows) == facts.num_patches, "the canvas has the number of tiles in the grid"
        return rows

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        config = self.config
        patches = rows.view(-1, config.rows, config.hidden)[:, 1:]
        if self.norm is not None:
            patches = self.norm(patches)
        return self.projector(patches.reshape(-1, config.hidden))
