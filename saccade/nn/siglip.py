"""SigLIP, for packed tiles from any number of images. A family brings the connector behind it.

Each tile is its own segment. A token's merge x merge patches stand together in it, so that bringing
them together is a view. Knows nothing about which image a tile is of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from saccade.core.types import Grid
from saccade.kernels.tower_attention import Backend
from saccade.nn.linear import Column, Linear, RowLinear
from saccade.nn.mlp import MLP
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import PatchKernel, block_pieces, copy_images, tile_facts
from saccade.nn.protocol import Cut, GridFacts, Pack, Pieces
from saccade.nn.siglip_config import Colours, SiglipConfig
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard

TOWER = "vision_model"


class SiglipBlock:
    """Pre-norm block: attention, then an MLP, each with a residual."""

    __slots__ = ("heads", "mlp", "norm1", "norm2", "out", "qkv", "scale")

    def __init__(self, weights: Weights, name: str, config: SiglipConfig, shard: Shard) -> None:
        hidden, attention = config.hidden, f"{name}.self_attn"
        self.heads = shard.divide(config.heads, "vision attention heads")
        self.scale = config.head_dim**-0.5
        self.norm1 = LayerNorm(weights, f"{name}.layer_norm1", hidden, config.norm_eps)
        self.norm2 = LayerNorm(weights, f"{name}.layer_norm2", hidden, config.norm_eps)
        if config.fused:
            self.qkv = Linear.fused_columns(weights, f"{attention}.qkv", hidden, 3, hidden, shard)
        else:
            columns = [Column(f"{attention}.{each}_proj", hidden, shard) for each in "qkv"]
            self.qkv = Linear.columns(weights, columns, hidden, bias=True)
        self.out = RowLinear(weights, f"{attention}.out_proj", hidden, hidden, shard, bias=True)
        self.mlp = MLP(
            weights,
            (f"{name}.mlp.fc1", f"{name}.mlp.fc2"),
            (hidden, config.intermediate),
            config.activation,
            shard,
        )

    def __call__(self, x: torch.Tensor, cuts: Sequence[Cut], attention: Backend) -> Pieces:
        """Do the block's work as `nn.patches.block_pieces` does."""
        return block_pieces(x, cuts, attention, self.scale, self._project, self._finish)

    def _project(self, rows: torch.Tensor, _cut: int) -> torch.Tensor:
        return self.qkv(self.norm1(rows)).view(len(rows), 3 * self.heads, -1)

    def _finish(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        y, normed = self.norm2.add_norm(rows, self.out(attended))
        return y + self.mlp(normed)


class SiglipEmbed:
    """Turns pixels of tiles into rows of patches, with their learned positions."""

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
        """Map uint8 [tiles * side, side, 3] -> [tiles * patches, hidden]."""
        config = self.config
        rows = self.kernel(pixels).view(-1, config.patches, config.hidden)
        rows += self.positions
        return rows.view(-1, config.hidden)


class SiglipTower:
    """uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`.

    Learned positions are added before the first block, so rows need no places.
    """

    __slots__ = (
        "config",
        "connector",
        "depth",
        "device",
        "hidden",
        "layers",
        "longest_segments",
        "norm",
        "tile_embed",
    )

    axes = 0

    def __init__(
        self,
        weights: Weights,
        config: SiglipConfig,
        colours: Colours,
        order: torch.Tensor,
        connector: Callable[[torch.Tensor], torch.Tensor],
        shard: Shard,
    ) -> None:
        """Build the tower.

        `order`: where each patch in a tile, in merged order, stands in the table of learned
        positions. `connector`: maps tokens' patches [M, merge^2, hidden] to embeddings [M, out].
        """
        self.config = config
        self.hidden, self.depth = config.hidden, config.depth
        self.longest_segments = (config.patches,)
        self.device = weights.device
        self.tile_embed = SiglipEmbed(weights, config, colours, order)
        self.layers = [
            SiglipBlock(weights, f"{TOWER}.encoder.layers.{i}", config, shard)
            for i in range(config.depth)
        ]
        self.norm = LayerNorm(weights, f"{TOWER}.post_layernorm", config.hidden, config.norm_eps)
        self.connector = connector

    def rows(self, patches: int) -> int:
        return patches // self.config.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        rows, columns = grid
        tiles = rows * columns + 1
        return tile_facts(tiles, self.config.patches, self.device)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        """Turn a canvas into rows. It has tiles side by side, the whole image last, and no more."""
        side, (segments,) = self.config.side, facts.segments
        across = pixels.shape[1] // side
        apart = pixels.view(-1, side, across, side, 3).transpose(1, 2).reshape(-1, side, 3)
        return self.tile_embed(apart[: len(segments) * side])

    def blocks(self, pack: Pack) -> Pieces:
        config, x, (cuts,) = self.config, pack.rows, pack.cuts
        for layer in self.layers:
            x = yield from layer(x, cuts, pack.attention)
        return self.connector(self.norm(x).view(-1, config.merge**2, config.hidden))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split embeddings tile by tile, as tiles follow each other directly."""
        return copy_images(self, embeddings, facts)
