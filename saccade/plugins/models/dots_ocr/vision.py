"""dots.ocr's vision encoder, for packed images of any size: Qwen2-VL's rotary embedding, RMSNorm
and gated MLPs.
"""

from __future__ import annotations

import torch

from saccade.families.kit.native_images import MAX_SIDE, ImageRules
from saccade.nn.mlp import GatedMLP
from saccade.nn.norm import RMSNorm
from saccade.nn.patches import PatchKernel
from saccade.nn.protocol import GridFacts
from saccade.nn.tower import AxialRope, BlockParts, TowerBlock, load_merger
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.dots_ocr.config import DotsConfig
from saccade.plugins.models.kit.axial_tower import AxialTower

TOWER = "vision_tower"
THETA = 10000.0
MERGER_EPS = 1e-6


def vision_block(weights: Weights, name: str, config: DotsConfig, shard: Shard) -> TowerBlock:
    """Load one block. Raises CheckpointError if a tensor is missing or has another shape."""
    parts, bias = BlockParts(weights, name, config, shard), config.bias
    sizes = config.hidden, config.intermediate
    return TowerBlock(
        parts,
        norms=parts.norms(RMSNorm, "norm1", "norm2"),
        qkv=parts.fused_heads("attn.qkv", bias=bias),
        out=parts.out("attn.proj", bias=bias),
        mlp=GatedMLP(weights, f"{name}.mlp", sizes, config.activation, shard, bias=bias),
    )


class DotsTower(AxialTower):
    """Encodes uint8 pixels to embeddings. Normalizes patches before the first block."""

    __slots__ = ("norm",)

    def __init__(
        self, weights: Weights, config: DotsConfig, rules: ImageRules, shard: Shard
    ) -> None:
        name, sizes = f"{TOWER}.patch_embed.patchifier", (config.hidden, config.patch, config.merge)
        kernel = PatchKernel(weights, f"{name}.proj", sizes, (rules.mean, rules.std))
        self.norm = RMSNorm(weights, f"{name}.norm", config.hidden, config.norm_eps)
        names = (f"{TOWER}.blocks.{i}" for i in range(config.depth))
        layers = [vision_block(weights, name, config, shard) for name in names]
        last_norm: RMSNorm | None = None
        if config.last_norm:
            last = f"{TOWER}.post_trunk_norm"
            last_norm = RMSNorm(weights, last, config.hidden, config.norm_eps)
        parts = f"{TOWER}.merger.ln_q", f"{TOWER}.merger.mlp.0", f"{TOWER}.merger.mlp.2"
        merged = config.hidden, config.merge**2, config.out_hidden
        merger = load_merger(weights, parts, merged, MERGER_EPS, shard)
        rope = AxialRope(weights, config.head_dim, THETA, MAX_SIDE)
        super().__init__(config, kernel, layers, last_norm, merger, rope)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        return self.norm(super().embed(pixels, facts))
