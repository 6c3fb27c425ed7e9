"""PaddleOCR-VL's tower, for packed images of any sizes: SigLIP's blocks, whose heads are turned by
row and column, and the projector behind them.

The square of learned positions is fitted to each image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.types import Grid
from saccade.families.qwen_vl.images import LONGEST_SIDE, ImageRules
from saccade.families.qwen_vl.paddleocr_vl.config import FittedConfig
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import PatchKernel, copy_images, fit_positions, merged_order
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.tower import AxialRope, BlockParts, TowerBlock, load_merger, run_blocks
from saccade.nn.transfer import send
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard

TOWER, PROJECTOR = "visual.vision_model", "projector"
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
        self.positions = weights.load(part).view(config.across, config.across, -1)
        names = (f"{TOWER}.encoder.layers.{i}" for i in range(config.depth))
        self.layers = [vision_block(weights, each, config, shard) for each in names]
        last = f"{TOWER}.post_layernorm"
        self.last_norm = LayerNorm(weights, last, config.hidden, config.norm_eps)
        parts = f"{PROJECTOR}.pre_norm", f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"
        merged = config.hidden, config.merge**2, config.out_hidden
        self.projector = load_merger(weights, parts, merged, PROJECTOR_EPS, shard)
        # The row rotates a head's first half, the column its second.
        self.rope = AxialRope(weights, config.head_dim, config.rope_theta, LONGEST_SIDE)

    def rows(self, patches: int) -> int:
        return patches // self.config.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        _, height, width = grid
        device = self.positions.device
        places = np.stack(merged_order(height, width, self.config.merge))  # [2, N]
        return GridFacts(
            places=send(places, device),
            position_embedding=fit_positions(
                self.positions, (height, width), self.config.merge, "bilinear"
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
