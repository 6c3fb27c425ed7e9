"""GLM-OCR's vision encoder, for packed images of any size, and its merger. Its blocks are CogViT's,
in which queries and keys are normalized, then rotated by row and column.

A token's patches are contiguous, so that the merger's convolution is a matrix multiplication.
"""

from __future__ import annotations

import torch

from saccade.families.kit.native_images import MAX_SIDE, ImageRules
from saccade.nn.linear import Column, Linear
from saccade.nn.mlp import GatedMLP
from saccade.nn.norm import LayerNorm, RMSNorm
from saccade.nn.patches import PatchKernel
from saccade.nn.tower import AxialRope, BlockParts, TowerBlock
from saccade.nn.weights import Part, Weights
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins.models.glm_ocr.config import CogConfig
from saccade.plugins.models.kit.axial_tower import AxialTower

TOWER = "visual"
MERGER_EPS = 1e-5
WIDER = 3
"""The width of the merger's MLP relative to a token."""


class TurnedHeads:
    """Computes queries, keys and values, and normalizes the queries and keys of each head."""

    __slots__ = ("eps", "heads", "ops", "product", "weight")

    def __init__(self, parts: BlockParts, part: str, *, bias: bool) -> None:
        self.heads, self.ops, self.eps = parts.heads, parts.weights.ops, parts.config.norm_eps
        self.product = parts.fused_heads(f"{part}.qkv", bias=bias)
        size = (parts.config.head_dim,)
        names = [f"{parts.name}.{part}.{each}_norm.weight" for each in "qk"]
        weights = [Part(name, size) for name in names for _ in range(self.heads)]
        self.weight = parts.weights.load(*weights).view(2 * self.heads, -1)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [n, hidden] to [n, 3 hidden / ranks]."""
        qkv = self.product(rows)
        turned = qkv.view(len(qkv), 3 * self.heads, -1)[:, : 2 * self.heads]
        turned.copy_(self.ops.rms_norm(turned, self.weight, self.eps))
        return qkv


def vision_block(weights: Weights, name: str, config: CogConfig, shard: Shard) -> TowerBlock:
    """Load one block. Raises CheckpointError if a tensor is missing or has another shape."""
    parts, bias = BlockParts(weights, name, config, shard), config.bias
    sizes = config.hidden, config.intermediate
    return TowerBlock(
        parts,
        norms=parts.norms(RMSNorm, "norm1", "norm2"),
        qkv=TurnedHeads(parts, "attn", bias=bias),
        out=parts.out("attn.proj", bias=bias),
        mlp=GatedMLP(weights, f"{name}.mlp", sizes, config.activation, shard, bias=bias),
    )


class GatedMerger:
    """Projects merge x merge patches to one token of the language model. Replicated on every
    rank.
    """

    __slots__ = ("conv", "mlp", "norm", "ops", "proj", "unit")

    def __init__(self, weights: Weights, config: CogConfig) -> None:
        hidden, out, self.unit = config.hidden, config.out_hidden, config.merge**2
        self.ops = weights.ops
        shape = (out, hidden, config.merge, config.merge)
        self.conv = Linear.convolution(weights, f"{TOWER}.downsample", shape)
        name = f"{TOWER}.merger"
        self.proj = Linear.columns(
            weights, [Column(f"{name}.proj", out, UNSHARDED)], out, bias=False
        )
        self.norm = LayerNorm(weights, f"{name}.post_projection_norm", out, MERGER_EPS)
        sizes = out, WIDER * out
        self.mlp = GatedMLP(weights, name, sizes, config.activation, UNSHARDED, bias=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden] to [M, out]."""
        merged = self.conv(x.view(len(x) // self.unit, -1))
        return self.mlp(self.ops.activate(self.norm(self.proj(merged)), "gelu"))


class CogTower(AxialTower):
    """Encodes uint8 pixels to embeddings with CogViT and its merger."""

    __slots__ = ()

    def __init__(
        self, weights: Weights, config: CogConfig, rules: ImageRules, shard: Shard
    ) -> None:
        sizes, colours = (config.hidden, config.patch, config.merge), (rules.mean, rules.std)
        kernel = PatchKernel(
            weights, f"{TOWER}.patch_embed.proj", sizes, colours, frames=config.frames
        )
        names = (f"{TOWER}.blocks.{i}" for i in range(config.depth))
        layers = [vision_block(weights, name, config, shard) for name in names]
        last = f"{TOWER}.post_layernorm"
        last_norm = RMSNorm(weights, last, config.hidden, config.norm_eps)
        merger = GatedMerger(weights, config)
        rope = AxialRope(weights, config.head_dim, config.rope_theta, MAX_SIDE)
        super().__init__(config, kernel, layers, last_norm, merger, rope)
