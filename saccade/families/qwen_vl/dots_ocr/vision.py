"""dots.ocr's tower, for packed images of any sizes: Qwen2-VL's rotary embedding, RMSNorm and gated
MLPs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.types import Grid
from saccade.families.qwen_vl.dots_ocr.config import DotsConfig
from saccade.families.qwen_vl.images import LONGEST_SIDE, ImageRules
from saccade.nn.mlp import GatedMLP
from saccade.nn.norm import RMSNorm
from saccade.nn.patches import PatchKernel, copy_images, merged_order
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.tower import AxialRope, BlockParts, TowerBlock, load_merger, run_blocks
from saccade.nn.transfer import send
from saccade.nn.weights import Weights
from saccade.parallel import Shard

TOWER = "vision_tower"
THETA = 10000.0
MERGER_EPS = 1e-6


def vision_block(weights: Weights, name: str, config: DotsConfig, shard: Shard) -> TowerBlock:
    """Load one block. Raises CheckpointError where a tensor is missing or misshapen."""
    parts, bias = BlockParts(weights, name, config, shard), config.bias
    sizes = config.hidden, config.intermediate
    return TowerBlock(
        parts,
        norms=parts.norms(RMSNorm, "norm1", "norm2"),
        qkv=parts.fused_heads("attn.qkv", bias=bias),
        out=parts.out("attn.proj", bias=bias),
        mlp=GatedMLP(weights, f"{name}.mlp", sizes, config.activation, shard, bias=bias),
    )


class DotsTower:
    """Turns uint8 pixels into embeddings. Implements `nn.protocol.VisionNet`."""

    __slots__ = (
        "config",
        "depth",
        "device",
        "hidden",
        "kernel",
        "last_norm",
        "layers",
        "merger",
        "norm",
        "rope",
    )
    axes = 2
    longest_segments = (None,)

    def __init__(
        self, weights: Weights, config: DotsConfig, rules: ImageRules, shard: Shard
    ) -> None:
        self.config, self.device = config, weights.device
        self.depth, self.hidden = config.depth, config.hidden
        name, sizes = f"{TOWER}.patch_embed.patchifier", (config.hidden, config.patch, config.merge)
        self.kernel = PatchKernel(weights, f"{name}.proj", sizes, (rules.mean, rules.std))
        self.norm = RMSNorm(weights, f"{name}.norm", config.hidden, config.norm_eps)
        names = (f"{TOWER}.blocks.{i}" for i in range(config.depth))
        self.layers = [vision_block(weights, name, config, shard) for name in names]
        self.last_norm: RMSNorm | None = None
        if config.last_norm:
            last = f"{TOWER}.post_trunk_norm"
            self.last_norm = RMSNorm(weights, last, config.hidden, config.norm_eps)
        parts = f"{TOWER}.merger.ln_q", f"{TOWER}.merger.mlp.0", f"{TOWER}.merger.mlp.2"
        merged = config.hidden, config.merge**2, config.out_hidden
        self.merger = load_merger(weights, parts, merged, MERGER_EPS, shard)
        # The row rotates a head's first half, the column its second.
        self.rope = AxialRope(weights, config.head_dim, THETA, LONGEST_SIDE)

    def rows(self, patches: int) -> int:
        return patches // self.config.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        _, height, width = grid
        places = np.stack(merged_order(height, width, self.config.merge))  # [2, N]
        return GridFacts(places=send(places, self.device), segments=((height * width,),))

    def embed(self, pixels: torch.Tensor, _: GridFacts) -> torch.Tensor:
        return self.norm(self.kernel(pixels))

    def blocks(self, pack: Pack) -> Pieces:
        x = yield from run_blocks(self.layers, pack, self.rope.rotation(pack.places))
        return self.merger(x if self.last_norm is None else self.last_norm(x))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings by image, in reading order."""
        return copy_images(self, embeddings, facts)
