"""PaddleOCR-VL's tower, for packed images of any sizes: SigLIP's blocks, whose heads are turned by
row and column, and the projector behind them.

The square of learned positions is fitted to each image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from saccade.core.types import Grid
from saccade.families.qwen_vl.images import LONGEST_SIDE, ImageRules
from saccade.families.qwen_vl.paddleocr_vl.config import FittedConfig
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import PatchKernel, copy_images, merged_order
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.token_merger import TokenMerger
from saccade.nn.tower import AxialRope, BlockParts, TowerBlock
from saccade.nn.transfer import send
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard

TOWER = "visual.vision_model"
PROJECTOR = "projector.pre_norm", "projector.linear_1", "projector.linear_2"
PROJECTOR_EPS = 1e-5


def vision_block(weights: Weights, name: str, config: FittedConfig, shard: Shard) -> TowerBlock:
    """Load one block. Raises CheckpointError where a tensor is missing or misshapen."""
    parts = BlockParts(weights, name, config, shard)
    return TowerBlock(
        parts,
        norms=parts.norms(LayerNorm, "layer_norm1", "layer_norm2"),
        qkv=parts.separate_heads("self_attn"),
        out=parts.out("self_attn.out_proj"),
        mlp=parts.mlp(),
    )


class FittedTower:
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
        self, weights: Weights, config: FittedConfig, rules: ImageRules, shard: Shard
    ) -> None:
        self.config = config
        self.depth, self.hidden = config.depth, config.hidden
        name, sizes = f"{TOWER}.embeddings", (config.hidden, config.patch, config.merge)
        colours = rules.mean, rules.std
        self.kernel = PatchKernel(weights, f"{name}.patch_embedding", sizes, colours)
        part = Part(f"{name}.position_embedding.weight", (config.across**2, config.hidden))
        self.positions = weights.load(part)
        names = (f"{TOWER}.encoder.layers.{i}" for i in range(config.depth))
        self.layers = [vision_block(weights, each, config, shard) for each in names]
        last = f"{TOWER}.post_layernorm"
        self.last_norm = LayerNorm(weights, last, config.hidden, config.norm_eps)
        merged = config.hidden, config.merge, config.out_hidden
        self.projector = TokenMerger(weights, PROJECTOR, merged, PROJECTOR_EPS, shard)
        # The row rotates a head's first half, the column its second.
        self.rope = AxialRope(weights, config.head_dim, config.rope_theta, LONGEST_SIDE)

    def rows(self, patches: int) -> int:
        return patches // self.config.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        _, height, width = grid
        device = self.positions.device
        row, column = merged_order(height, width, self.config.merge)
        order = send(row * width + column, device)
        return GridFacts(
            places=send(np.stack((row, column)), device),
            position_embedding=self._fitted(height, width).index_select(0, order),
            segments=((height * width,),),
        )

    def _fitted(self, height: int, width: int) -> torch.Tensor:
        """Return the positions of height x width patches, in reading order."""
        across = self.config.across
        table = self.positions.view(across, across, -1).permute(2, 0, 1)[None].float()
        found = F.interpolate(table, (height, width), mode="bilinear", align_corners=False)
        return found[0].flatten(1).t().to(self.positions.dtype)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        assert facts.position_embedding is not None, "made by `grid_facts`"
        return self.kernel(pixels) + facts.position_embedding

    def blocks(self, pack: Pack) -> Pieces:
        x, (cuts,) = pack.rows, pack.cuts
        rotation = self.rope.rotation(pack.places)
        rotations = [rotation.part(cut.rows) for cut in cuts]
        for layer in self.layers:
            x = yield from layer(x, cuts, pack.attention, rotations)
        return self.projector(self.last_norm(x))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings by image, in reading order."""
        return copy_images(self, embeddings, facts)
