"""InternViT and the projector behind it, for packed tiles from any number of images.

Each tile is its own segment: a class token, then its patches. The merge x merge patches in a token
stand together, so that shuffling pixels into channels is a view. Which image a tile is from is left
to callers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.types import Grid
from saccade.families.internvl.config import InternVisionConfig
from saccade.families.internvl.images import TileRules
from saccade.kernels.tower_attention import Backend
from saccade.nn.linear import Column, Linear, RowLinear, share
from saccade.nn.mlp import MLP, activation
from saccade.nn.norm import LayerNorm, RMSNorm
from saccade.nn.patches import PatchKernel, block_pieces, copy_images, merged_order, tile_facts
from saccade.nn.protocol import Cut, GridFacts, Pack, Pieces
from saccade.nn.transfer import send
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard

TOWER = "vision_tower"
PROJECTOR = "multi_modal_projector"
PROJECTOR_EPS = 1e-5
QK_NORM_EPS = 1e-6


class WideNorm:
    """RMS norm over the values in all heads together, which ranks share."""

    __slots__ = ("hidden", "ops", "shard", "weight")

    def __init__(self, weights: Weights, name: str, hidden: int, shard: Shard) -> None:
        mine = share(shard, 0, hidden, f"values of {name}")
        self.weight = weights.load(Part(f"{name}.weight", (hidden,), (mine,)))
        self.hidden = hidden
        self.ops = weights.ops
        self.shard = shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [N, hidden / ranks]."""
        if self.shard.size == 1:
            return self.ops.rms_norm(x, self.weight, QK_NORM_EPS)
        wide = x.float()
        squares = self.shard.all_reduce(wide.square().sum(1, keepdim=True))
        return self.weight * (wide * torch.rsqrt(squares / self.hidden + QK_NORM_EPS)).to(x.dtype)


class InternVisionBlock:
    """Block with attention, then an MLP, each on normalised input, scaled by channel, and with a
    residual.
    """

    __slots__ = ("heads", "mlp", "norm1", "norm2", "out", "qk_norms", "qkv", "scale", "scales")

    def __init__(
        self, weights: Weights, name: str, config: InternVisionConfig, shard: Shard
    ) -> None:
        hidden, attention = config.hidden, f"{name}.attention"
        self.heads = shard.divide(config.heads, "vision attention heads")
        self.scale = config.head_dim**-0.5
        self.norm1 = _norm(weights, f"{name}.layernorm_before", config)
        self.norm2 = _norm(weights, f"{name}.layernorm_after", config)
        columns = [Column(f"{attention}.{each}_proj", hidden, shard) for each in "qkv"]
        self.qkv = Linear.columns(weights, columns, hidden, bias=config.qkv_bias)
        self.qk_norms = [
            WideNorm(weights, f"{attention}.{each}_norm", hidden, shard)
            for each in ("qk" if config.qk_norm else "")
        ]
        self.out = RowLinear(
            weights, f"{attention}.projection_layer", hidden, hidden, shard, bias=True
        )
        self.mlp = MLP(
            weights,
            (f"{name}.mlp.fc1", f"{name}.mlp.fc2"),
            (hidden, config.intermediate),
            config.activation,
            shard,
        )
        self.scales = [weights.load(Part(f"{name}.lambda_{i}", (hidden,))) for i in (1, 2)]

    def __call__(self, x: torch.Tensor, cuts: Sequence[Cut], attention: Backend) -> Pieces:
        """Run as `nn.patches.block_pieces` does."""
        return block_pieces(x, cuts, attention, self.scale, self._project, self._finish)

    def _project(self, rows: torch.Tensor, _cut: int) -> torch.Tensor:
        qkv = self.qkv(self.norm1(rows))
        for part, norm in zip(qkv.chunk(3, dim=1), self.qk_norms):
            part.copy_(norm(part))
        return qkv.view(len(rows), 3 * self.heads, -1)

    def _finish(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        y, normed = self.norm2.add_norm(rows, self.out(attended) * self.scales[0])
        return torch.addcmul(y, self.mlp(normed), self.scales[1])


class TileEmbed:
    """Turns tiles' pixels into rows: class token and patches, with their learned positions."""

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
        """Turn pixels, uint8 [tiles * side, side, 3], into [tiles * rows, hidden]."""
        config = self.config
        patches = self.kernel(pixels).view(-1, config.patches, config.hidden)
        rows = torch.cat((self.first.expand(len(patches), -1, -1), patches), dim=1)
        rows += self.positions
        return rows.view(-1, config.hidden)


class Projector:
    """Turns merged rows into the language model's."""

    __slots__ = ("down", "norm", "up")

    def __init__(self, weights: Weights, config: InternVisionConfig, shard: Shard) -> None:
        merged, out = config.hidden * config.merge**2, config.out_hidden
        self.norm = LayerNorm(weights, f"{PROJECTOR}.layer_norm", merged, PROJECTOR_EPS)
        self.up = Linear.columns(
            weights,
            [Column(f"{PROJECTOR}.linear_1", out, shard)],
            merged,
            bias=True,
            activation=activation(config.projector_activation),
        )
        self.down = RowLinear(weights, f"{PROJECTOR}.linear_2", out, out, shard, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [M, hidden * merge^2] to [M, out_hidden]."""
        return self.down(self.up(self.norm(x)))


class InternVisionTower:
    """Turns uint8 pixels into embeddings. Implements `nn.protocol.VisionNet`.

    Learned positions are added before the first block, so rows need no rotation.
    """

    __slots__ = (
        "config",
        "depth",
        "device",
        "hidden",
        "layers",
        "longest_segments",
        "norm",
        "projector",
        "tile_embed",
    )

    axes = 0

    def __init__(
        self, weights: Weights, config: InternVisionConfig, rules: TileRules, shard: Shard
    ) -> None:
        self.config = config
        self.hidden, self.depth = config.hidden, config.depth
        self.longest_segments = (config.rows,)
        self.device = weights.device
        self.tile_embed = TileEmbed(weights, config, rules)
        self.layers = [
            InternVisionBlock(weights, f"{TOWER}.encoder.layer.{i}", config, shard)
            for i in range(config.depth)
        ]
        self.norm = (
            LayerNorm(weights, f"{TOWER}.layernorm", config.hidden, config.norm_eps)
            if config.final_norm
            else None
        )
        self.projector = Projector(weights, config, shard)

    def rows(self, patches: int) -> int:
        return patches // self.config.rows * self.config.tokens

    def grid_facts(self, grid: Grid) -> GridFacts:
        (tiles,) = grid
        return tile_facts(tiles, self.config.rows, self.device)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        rows = self.tile_embed(pixels)
        assert len(rows) == facts.num_patches, "the canvas is as many tiles as the grid says"
        return rows

    def blocks(self, pack: Pack) -> Pieces:
        config, x, (cuts,) = self.config, pack.rows, pack.cuts
        for layer in self.layers:
            x = yield from layer(x, cuts, pack.attention)
        x = x.view(-1, config.rows, config.hidden)[:, 1:]
        if self.norm is not None:
            x = self.norm(x)
        return self.projector(x.reshape(-1, config.hidden * config.merge**2))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings by image. An image's tiles follow each other directly."""
        return copy_images(self, embeddings, facts)


def _norm(weights: Weights, name: str, config: InternVisionConfig) -> LayerNorm | RMSNorm:
    kind = LayerNorm if config.norm == "layer_norm" else RMSNorm
    return kind(weights, name, config.hidden, config.norm_eps)
