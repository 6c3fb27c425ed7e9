"""HunyuanOCR's vision encoder, for packed images of any size, and its merger.

The grid of learned positions is interpolated to the size of each image. A token's patches are
contiguous, so that the merger's first convolution is a matrix multiplication. A learned newline
follows each line of tokens, and two other learned rows surround the image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.types import Grid
from saccade.kernels.device import send
from saccade.nn.linear import Column, Linear
from saccade.nn.mlp import activation
from saccade.nn.norm import LayerNorm, RMSNorm
from saccade.nn.patches import PatchKernel, fit_positions, split_images
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.tower import BlockParts, TowerBlock, run_blocks
from saccade.nn.weights import Part, Weights
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins.models.hunyuan_vl.config import LearnedConfig
from saccade.plugins.models.hunyuan_vl.images import LineRules

TOWER = "vision_tower"


def vision_block(weights: Weights, name: str, config: LearnedConfig, shard: Shard) -> TowerBlock:
    """Load one block. Raises CheckpointError if a tensor is missing or has another shape."""
    parts = BlockParts(weights, name, config, shard)
    return TowerBlock(
        parts,
        norms=parts.norms(LayerNorm, "layer_norm1", "layer_norm2"),
        qkv=parts.separate_heads("self_attn"),
        out=parts.out("self_attn.o_proj"),
        mlp=parts.mlp(),
    )


class LineMerger:
    """Projects merge x merge patches to one token of the language model. Replicated on every
    rank.
    """

    __slots__ = ("after", "before", "conv", "last", "marks", "newline", "out", "unit")

    def __init__(self, weights: Weights, config: LearnedConfig) -> None:
        name, hidden, out = f"{TOWER}.patch_merger", config.hidden, config.out_hidden
        self.unit = config.merge**2
        self.before = RMSNorm(weights, f"{name}.before_rms", hidden, config.norm_eps)
        square = (config.merge, config.merge)
        act = activation(config.activation)
        self.conv = Linear.convolution(
            weights, f"{name}.proj_conv", (2 * hidden, hidden, *square), act
        )
        self.out = Linear.convolution(weights, f"{name}.proj_out", (4 * hidden, 2 * hidden, 1, 1))
        column = Column(f"{name}.mlp", out, UNSHARDED)
        self.last = Linear.columns(weights, [column], 4 * hidden, bias=True)
        self.newline = weights.load(Part(f"{name}.image_newline", (4 * hidden,)))[None]
        ends = (Part(f"{name}.image_{end}", (out,)) for end in ("begin", "end"))
        self.marks = torch.stack([weights.load(part) for part in ends])  # [2, out]
        self.after = RMSNorm(weights, f"{name}.after_rms", out, config.norm_eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map rows of patches [N, hidden] to tokens [M, out]."""
        merged = self.before(x).view(len(x) // self.unit, -1)
        return self.after(self.last(self.out(self.conv(merged))))

    def around(self) -> torch.Tensor:
        """Return the embeddings of the newline, and of the image's start and end, [3, out]."""
        return self.after(torch.cat((self.last(self.newline), self.marks)))


class LineTower:
    """Encodes uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`."""

    __slots__ = ("config", "depth", "hidden", "kernel", "layers", "merger", "positions", "rules")
    axes = 0
    longest_segments = (None,)

    def __init__(
        self, weights: Weights, config: LearnedConfig, rules: LineRules, shard: Shard
    ) -> None:
        self.config, self.rules = config, rules
        self.depth, self.hidden = config.depth, config.hidden
        name, sizes = f"{TOWER}.embeddings", (config.hidden, config.patch, config.merge)
        colours = rules.mean, rules.std
        self.kernel = PatchKernel(weights, f"{name}.patch_embedding", sizes, colours)
        # The first position is for a token that images do not have.
        shape = (config.across**2 + 1, config.hidden)
        part = Part(f"{name}.position_embedding.weight", shape, (slice(1, shape[0]),))
        self.positions = weights.load(part).view(config.across, config.across, -1)
        names = (f"{TOWER}.layers.{i}" for i in range(config.depth))
        self.layers = [vision_block(weights, name, config, shard) for name in names]
        self.merger = LineMerger(weights, config)

    def rows(self, patches: int) -> int:
        return patches // self.config.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        """Return the grid's `GridFacts`.

        `restore` maps each token to its row: an image token, the newline, or the start or end.
        """
        device, (_, height, width) = self.positions.device, grid
        return GridFacts(
            places=torch.zeros((0, height * width), dtype=torch.int64).to(device),
            position_embedding=fit_positions(
                self.positions, (height, width), self.config.merge, self.config.interpolation
            ),
            restore=send(lines(*self.rules.lines(grid)), device),
            segments=((height * width,),),
        )

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        assert facts.position_embedding is not None, "made by `grid_facts`"
        return self.kernel(pixels) + facts.position_embedding

    def blocks(self, pack: Pack) -> Pieces:
        return self.merger((yield from run_blocks(self.layers, pack)))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the tokens' embeddings [M, out] into one [m, out] per image, and insert newlines
        and the image's start and end.
        """
        around, found = self.merger.around(), []
        for fact, part in zip(facts, split_images(self, embeddings, facts)):
            assert fact.restore is not None, "made by `grid_facts`"
            found.append(torch.cat((part, around)).index_select(0, fact.restore))
        return found


def lines(rows: int, columns: int) -> npt.NDArray[np.int64]:
    """Return the source row of each token.

    The source has the image's tokens, then the embeddings of a newline, of the image's start and of
    its end.
    """
    count = rows * columns
    table = np.arange(count).reshape(rows, columns)
    ended = np.pad(table, ((0, 0), (0, 1)), constant_values=count)
    return np.concatenate(([count + 1], ended.reshape(-1), [count + 2]))
