"""MiniCPM-V's SigLIP, for views of any size.

A patch's learned position depends on its place in the view. After one of the layers, 2 x 2 patches
attend to each other and become one, and 2 x 2 of these become a token. A token's rows are
contiguous, and so are the rows of each 2 x 2 patches within it, so that merging them is a view.
Each view of an image is a segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from saccade.core.types import Grid
from saccade.kernels.device import send
from saccade.kernels.reference.segments import Segments
from saccade.nn.mlp import MLP
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import PatchKernel, copy_images, merged_order, region_blocks
from saccade.nn.protocol import Cut, GridFacts, Pack, Pieces
from saccade.nn.shapes import SiglipConfig
from saccade.nn.tower import BlockParts, PatchMerger, together
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.kit.siglip import siglip_block
from saccade.plugins.models.minicpm.config import MergingTower
from saccade.plugins.models.minicpm.images import SliceRules, view_tokens

TOWER = "vision_tower"
CONNECTOR_EPS = 1e-6
FOUR = 4
"""Number of rows that are merged into one."""


def four_to_one(
    weights: Weights, name: str, sizes: tuple[int, int, int], eps: float, act: str, shard: Shard
) -> PatchMerger:
    """Load a merger of four rows into one.

    sizes: the number of values of its input rows, hidden rows and output rows.
    """
    norm = LayerNorm(weights, f"{name}.pre_norm", sizes[0], eps)
    mlp = MLP(weights, (f"{name}.linear_1", f"{name}.linear_2"), sizes, act, shard)
    return PatchMerger(FOUR, norm, mlp, late=True)


class WindowMerger:
    """Merges each group of four rows: applies attention within the group, then adds an MLP to its
    mean.
    """

    __slots__ = ("heads", "mlp", "norm", "out", "qkv", "scale")

    def __init__(self, weights: Weights, config: SiglipConfig, shard: Shard) -> None:
        name, hidden = f"{TOWER}.vit_merger", config.hidden
        parts = BlockParts(weights, name, config, shard)
        self.heads, self.scale = parts.heads, config.head_dim**-0.5
        (self.norm,) = parts.norms(LayerNorm, "layer_norm1")
        self.qkv = parts.separate_heads("self_attn")
        self.out = parts.out("self_attn.out_proj")
        sizes, act = (FOUR * hidden, FOUR * config.intermediate, hidden), "gelu_pytorch_tanh"
        self.mlp = four_to_one(weights, name, sizes, config.norm_eps, act, shard)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden] to [N / 4, hidden]."""
        qkv = self.qkv(self.norm(x)).view(len(x) // FOUR, FOUR, 3, self.heads, -1)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # [W, H, 4, D] each
        seen = F.scaled_dot_product_attention(queries, keys, values, scale=self.scale)
        x = x + self.out(seen.transpose(1, 2).reshape(len(x), -1))
        return x.view(len(x) // FOUR, FOUR, -1).mean(1) + self.mlp(x)


class MiniCPMTower:
    """Encodes uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`.

    Learned positions are added before the first block, and there is no rotary embedding.
    """

    __slots__ = (
        "config",
        "connector",
        "depth",
        "hidden",
        "kernel",
        "layers",
        "merger",
        "norm",
        "positions",
        "within",
    )
    axes = 0
    longest_segments = (None,)

    def __init__(
        self, weights: Weights, config: MergingTower, rules: SliceRules, shard: Shard
    ) -> None:
        siglip = config.siglip
        self.config, self.depth, hidden = config, config.depth, siglip.hidden
        self.hidden = hidden
        name, sizes = f"{TOWER}.embeddings", (hidden, siglip.patch, siglip.merge)
        self.kernel = PatchKernel(weights, f"{name}.patch_embedding", sizes, rules.colours)
        table = Part(f"{name}.position_embedding.weight", (siglip.patches, hidden))
        self.positions = weights.load(table)
        order = nested(np.arange(siglip.merge**2), siglip.merge)
        self.within = send(order, weights.device)
        self.layers = [
            siglip_block(weights, f"{TOWER}.encoder.layers.{i}", siglip, shard)
            for i in range(siglip.depth)
        ]
        self.merger = WindowMerger(weights, siglip, shard) if config.halves else None
        self.norm = LayerNorm(weights, f"{TOWER}.post_layernorm", hidden, siglip.norm_eps)
        sizes = (FOUR * hidden, FOUR * hidden, siglip.out_hidden)
        self.connector = four_to_one(weights, "merger.mlp.0", sizes, CONNECTOR_EPS, "gelu", shard)

    def rows(self, patches: int) -> int:
        return patches // self.config.siglip.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        """Return the grid's `GridFacts`.

        `order` maps each token to its block on the canvas.
        """
        merge, device = self.config.siglip.merge, self.positions.device
        counts = view_tokens(grid)
        places = [self._places(*grid[:2])]
        if len(counts) > 1:
            places += [self._places(*grid[4:])] * (len(counts) - 1)
        found = send(np.concatenate(places), device)
        return GridFacts(
            places=torch.zeros((0, len(found)), dtype=torch.int64).to(device),
            position_embedding=self.positions.index_select(0, found),
            order=send(canvas_blocks(grid), device),
            segments=(tuple(count * merge**2 for count in counts),),
        )

    def _places(self, rows: int, columns: int) -> np.ndarray:
        """Return each patch's row in the table of learned positions, for a view of `rows` x
        `columns` tokens.
        """
        merge, across = self.config.siglip.merge, self.config.siglip.across
        size = rows * merge, columns * merge
        row, column = (nested(each, merge) for each in merged_order(*size, merge))
        down, right = (_buckets(edge, across) for edge in size)
        return down[row] * across + right[column]

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        siglip, order = self.config.siglip, facts.order
        assert order is not None and facts.position_embedding is not None, "made by `grid_facts`"
        blocks = self.kernel.cut(pixels).view(-1, siglip.merge**2, 3 * siglip.patch**2)
        patches = blocks.index_select(0, order).index_select(1, self.within)
        return self.kernel.linear(patches.flatten(0, 1)) + facts.position_embedding

    def blocks(self, pack: Pack) -> Pieces:
        config, x, (cuts,) = self.config, pack.rows, pack.cuts
        for number, layer in enumerate(self.layers):
            x = yield from layer(x, cuts, pack.attention)
            if self.merger is not None and number == config.insert:
                cuts = tuple(map(quarter, cuts))
                x = yield from self._merged(self.merger, x, cuts)
        return self.connector(self.norm(x))

    def _merged(self, merger: WindowMerger, x: torch.Tensor, cuts: Sequence[Cut]) -> Pieces:
        """Run the merger on each cut, which is given by its output rows.

        Yields costs whose sum is the part of `MergingTower.depth` beyond the layers.
        """
        config, found = self.config, []
        each = FOUR * (config.depth - config.insert - 1) - config.layers_after
        for cut in cuts:
            yield each * (cut.rows.stop - cut.rows.start)
            found.append(merger(x[FOUR * cut.rows.start : FOUR * cut.rows.stop]))
        return together(found)

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings into one tensor per image. The views of an image are contiguous."""
        return copy_images(self, embeddings, facts)


def nested(patches: np.ndarray, merge: int) -> np.ndarray:
    """Reorder patches [N] so that each group of 2 x 2 patches is contiguous within its token.

    A token's merge x merge patches must already be contiguous, row by row.
    """
    row, column = merged_order(merge, merge, 2)
    return patches.reshape(-1, merge**2)[:, row * merge + column].reshape(-1)


def canvas_blocks(grid: Grid) -> np.ndarray:
    """Return the canvas block of each token [M]: the whole image, then slice by slice."""
    rows, columns, *cut = grid
    slices = [(cut[0], cut[1], cut[2], cut[3])] if cut else []
    return region_blocks((1, 1, rows, columns), *slices)


def quarter(cut: Cut) -> Cut:
    """Return the same cut, in units of rows that replace four rows each."""
    rows, keys = (slice(each.start // FOUR, each.stop // FOUR) for each in (cut.rows, cut.keys))
    if cut.rows == cut.keys:
        bounds, longest = cut.segments.bounds // FOUR, cut.segments.longest // FOUR
    else:  # a part of a segment, which may start and end within a group of four rows
        longest = rows.stop - rows.start
        bounds = torch.tensor([0, longest], dtype=torch.int32, device=cut.segments.bounds.device)
    return Cut(rows, keys, Segments(bounds, longest))


def _buckets(size: int, across: int) -> np.ndarray:
    """Return the nearest row, or column, of the learned positions for each of `size` patches.

    Follows transformers' `get_vision_nearest_position_ids`.
    """
    bounds = torch.arange(1 / across, 1.0, 1 / across)
    return torch.bucketize(torch.arange(size) / size, bounds, right=True).numpy()
