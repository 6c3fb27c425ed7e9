"""SigLIP for tiles of any number of images in one pack. A family adds the projector (`connector`).

A token's merge x merge patches are contiguous within the tile, so merging them is a view.
"""

from __future__ import annotations

import torch

from saccade.core.types import Grid
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import PatchKernel
from saccade.nn.protocol import GridFacts
from saccade.nn.shapes import BlocksConfig, Colours, SiglipConfig
from saccade.nn.tower import BlockParts, Layer, TowerBlock
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.kit.tile_tower import TileTower

TOWER = "vision_model"


def siglip_block(
    weights: Weights, name: str, config: BlocksConfig, shard: Shard, *, fused: bool = False
) -> TowerBlock:
    """Load one block. Raises CheckpointError if a tensor is missing or has the wrong shape.

    fused: as in `SiglipConfig`.
    """
    parts = BlockParts(weights, name, config, shard)
    return TowerBlock(
        parts,
        norms=parts.norms(LayerNorm, "layer_norm1", "layer_norm2"),
        qkv=parts.fused_heads("self_attn.qkv") if fused else parts.separate_heads("self_attn"),
        out=parts.out("self_attn.out_proj"),
        mlp=parts.mlp(),
    )


class SiglipEmbed:
    """Maps pixels of tiles to rows of patches, and adds learned positions."""

    __slots__ = ("config", "kernel", "positions")

    def __init__(
        self, weights: Weights, config: SiglipConfig, colours: Colours, order: torch.Tensor
    ) -> None:
        name, hidden = f"{TOWER}.embeddings", config.hidden
        self.config = config
        sizes = hidden, config.patch, config.merge
        self.kernel = PatchKernel(weights, f"{name}.patch_embedding", sizes, colours)
        shape = (*((1,) if config.fused else ()), config.patches, hidden)
        table = weights.load(Part(f"{name}.position_embedding.weight", shape)).view(-1, hidden)
        # [patches, hidden]
        self.positions = table.index_select(0, order.to(weights.device))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map uint8 [tiles * covered, covered, 3] -> [tiles * patches, hidden]."""
        config = self.config
        rows = self.kernel(pixels).view(-1, config.patches, config.hidden)
        rows += self.positions
        return rows.view(-1, config.hidden)


class SiglipTower(TileTower):
    """Encodes tiles with SigLIP, followed by the projector of a family (`connector`)."""

    __slots__ = ("connector", "norm", "tile_embed")

    def __init__(
        self,
        weights: Weights,
        config: SiglipConfig,
        colours: Colours,
        order: torch.Tensor,
        connector: Layer,
        shard: Shard,
    ) -> None:
        """Build the encoder.

        order: for each patch of a tile in merged order, its index in the table of learned
        positions.
        connector: maps tokens' patches [M, merge^2, hidden] to embeddings [M, out].
        """
        self.tile_embed = SiglipEmbed(weights, config, colours, order)
        names = (f"{TOWER}.encoder.layers.{i}" for i in range(config.depth))
        layers = [siglip_block(weights, name, config, shard, fused=config.fused) for name in names]
        super().__init__(config, weights.device, layers)
        self.norm = LayerNorm(weights, f"{TOWER}.post_layernorm", config.hidden, config.norm_eps)
        self.connector = connector

    def grid_facts(self, grid: Grid) -> GridFacts:
        rows, columns = grid
        return self.tile_facts(rows * columns + 1)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        """Map a canvas to rows. On the canvas, tiles are side by side, with the thumbnail last."""
        side, covered, (segments,) = self.config.side, self.config.covered, facts.segments
        across = pixels.shape[1] // side
        apart = pixels.view(-1, side, across, side, 3).transpose(1, 2).reshape(-1, side, side, 3)
        tiles = apart[: len(segments), :covered, :covered]
        return self.tile_embed(tiles.reshape(-1, covered, 3))

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        config = self.config
        return self.connector(self.norm(rows).view(-1, config.merge**2, config.hidden))
