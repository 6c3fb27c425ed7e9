"""LFM2-VL's SigLIP 2, for views of any size, and its projector.

The grid of learned positions is resized to the size of each view. A token's patches are contiguous,
so that pixel shuffle is a view of the tensor. Each tile is a segment, and so is the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.types import Grid
from saccade.kernels.device import send
from saccade.nn.mlp import MLP
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import PatchKernel, copy_images, fit_positions, region_blocks
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.shapes import SiglipConfig
from saccade.nn.tower import PatchMerger, run_blocks
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.kit.siglip import TOWER, siglip_block
from saccade.plugins.models.lfm2_vl.config import ProjectorConfig
from saccade.plugins.models.lfm2_vl.images import ThumbnailRules

PROJECTOR = "multi_modal_projector"
PROJECTOR_EPS = 1e-5


def shuffle_projector(
    weights: Weights, config: SiglipConfig, projector: ProjectorConfig, shard: Shard
) -> PatchMerger:
    """Load the projector. Raises CheckpointError if a tensor is missing or has another shape."""
    unit = config.merge**2
    merged = config.hidden * unit
    norm: LayerNorm | None = None
    if projector.normed:
        norm = LayerNorm(weights, f"{PROJECTOR}.layer_norm", merged, PROJECTOR_EPS)
    names = f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"
    sizes, act = (merged, projector.hidden, config.out_hidden), projector.activation
    mlp = MLP(weights, names, sizes, act, shard, bias=projector.bias)
    return PatchMerger(unit, norm, mlp, late=True)


class Siglip2Tower:
    """Encodes uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`."""

    __slots__ = (
        "config",
        "depth",
        "hidden",
        "kernel",
        "layers",
        "norm",
        "positions",
        "projector",
        "rules",
    )
    axes = 0
    longest_segments = (None,)

    def __init__(
        self,
        weights: Weights,
        config: SiglipConfig,
        rules: ThumbnailRules,
        projector: ProjectorConfig,
        shard: Shard,
    ) -> None:
        self.config, self.rules = config, rules
        self.depth, self.hidden = config.depth, config.hidden
        name, sizes = f"{TOWER}.embeddings", (config.hidden, config.patch, config.merge)
        kernel = f"{name}.patch_embedding"
        self.kernel = PatchKernel(weights, kernel, sizes, rules.colours, flat=True)
        shape = (config.patches, config.hidden)
        table = weights.load(Part(f"{name}.position_embedding.weight", shape))
        self.positions = table.view(config.across, config.across, -1)
        names = (f"{TOWER}.encoder.layers.{i}" for i in range(config.depth))
        self.layers = [siglip_block(weights, name, config, shard) for name in names]
        self.norm = LayerNorm(weights, f"{TOWER}.post_layernorm", config.hidden, config.norm_eps)
        self.projector = shuffle_projector(weights, config, projector, shard)

    def rows(self, patches: int) -> int:
        return patches // self.config.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        """Return the grid's `GridFacts`.

        `order` maps each token to its block on the canvas.
        """
        device, merge = self.positions.device, self.config.merge
        counts, (rows, columns, *cut) = self.rules.view_tokens(grid), grid
        edge = self.rules.tile // self.rules.unit
        views = [self._fitted(edge, edge)] * math.prod(cut) if cut else []
        positions = torch.cat([*views, self._fitted(rows, columns)] if rows else views)
        return GridFacts(
            places=torch.zeros((0, len(positions)), dtype=torch.int64).to(device),
            position_embedding=positions,
            order=send(canvas_blocks(grid, edge), device),
            segments=(tuple(count * merge**2 for count in counts),),
        )

    def _fitted(self, rows: int, columns: int) -> torch.Tensor:
        """Return the learned positions for a view of `rows` x `columns` tokens, in merged order."""
        merge = self.config.merge
        size = rows * merge, columns * merge
        return fit_positions(self.positions, size, merge, "bilinear", antialias=True)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        config, order = self.config, facts.order
        assert order is not None and facts.position_embedding is not None, "made by `grid_facts`"
        blocks = self.kernel.cut(pixels).view(-1, config.merge**2, 3 * config.patch**2)
        patches = blocks.index_select(0, order).flatten(0, 1)
        return self.kernel.linear(patches) + facts.position_embedding

    def blocks(self, pack: Pack) -> Pieces:
        return self.projector(self.norm((yield from run_blocks(self.layers, pack))))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings into one tensor per image. The views of an image are contiguous."""
        return copy_images(self, embeddings, facts)


def canvas_blocks(grid: Grid, edge: int) -> np.ndarray:
    """Return the canvas block of each token [M]: tile by tile, then the whole image.

    edge: the edge of a tile in tokens.
    """
    rows, columns, *cut = grid
    tiles = [(cut[0], cut[1], edge, edge)] if cut else []
    return region_blocks(*tiles, (1, 1, rows, columns))
