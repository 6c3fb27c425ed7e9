"""Step3-VL's perception encoder and its projector, for packed views of any images.

Each view is a segment. Its patches are stored in blocks of 4 x 4, which consist of cells of 2 x 2.
So four contiguous rows become one row in each convolution after the encoder, and a patch's position
determines the index of its row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from saccade.core.types import Grid
from saccade.kernels.device import send
from saccade.kernels.matrix import DenseMatrix
from saccade.kernels.reference.patchify import patchify
from saccade.nn.linear import Column, Linear
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import copy_images
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.tower import AxialRope, BlockParts, ScaledBlock, run_blocks
from saccade.nn.weights import Part, Weights
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins.models.step3_vl.config import REDUCTION, PerceptionConfig
from saccade.plugins.models.step3_vl.images import CropRules

TOWER = "vision_model"
HALVINGS = 2
"""Number of convolutions after the encoder, each of which halves both edges."""
Numbers = TypeVar("Numbers", torch.Tensor, npt.NDArray[np.int64])


def row_in_view(row: Numbers, column: Numbers, across: Numbers, nested: int) -> Numbers:
    """Return the row of the patch at (row, column) within its view, which is `across` patches wide.

    nested: the number of levels of 2 x 2 cells. With 0, patches are in raster order.
    """
    if not nested:
        return row * across + column
    cell = row_in_view(row // 2, column // 2, across // 2, nested - 1)
    return 4 * cell + 2 * (row % 2) + column % 2


def view_places(across: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions [3, across^2] of a view's rows, and each row's patch as its index in
    raster order.

    A position is (column, row, width of the view in patches).
    """
    row, column = np.indices((across, across)).reshape(2, -1)
    width = np.full_like(row, across)
    order = np.argsort(row_in_view(row, column, width, HALVINGS))
    return np.stack((column, row, width))[:, order], order


class HalvingConvolution:
    """A 3 x 3 convolution with stride 2 and zero padding, over views of any sizes."""

    __slots__ = ("linear", "nested")

    def __init__(self, weights: Weights, name: str, sizes: tuple[int, int], nested: int) -> None:
        """Load the weights.

        sizes: the number of values per row of the input and of the output.

        nested: the number of levels of 2 x 2 cells in the input.
        """
        inputs, outputs = sizes
        kernel = weights.load(Part(f"{name}.weight", (outputs, inputs, 3, 3)))
        matrix = weights.matrix(kernel.permute(0, 2, 3, 1).reshape(outputs, -1), f"{name}.weight")
        bias = weights.load(Part(f"{name}.bias", (outputs,)))
        self.linear = Linear(weights.ops, matrix, bias)
        self.nested = nested

    def __call__(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map rows [N, inputs] to [N / 4, outputs], and their positions [3, N] to [3, N / 4]."""
        column, row, across = places[:, ::4]
        own = torch.arange(0, len(x), 4, device=x.device)
        first = own - row_in_view(row, column, across, self.nested)
        taps = []
        for down in (-1, 0, 1):
            for aside in (-1, 0, 1):
                inside = (row + down >= 0) & (column + aside >= 0)
                found = first + row_in_view(row + down, column + aside, across, self.nested)
                taps.append(x.index_select(0, torch.where(inside, found, own)) * inside[:, None])
        return self.linear(torch.cat(taps, dim=1)), places[:, ::4] // 2


def perception_block(
    weights: Weights, name: str, config: PerceptionConfig, shard: Shard
) -> ScaledBlock:
    """Load one block. Raises CheckpointError if a tensor is missing or has another shape."""
    parts = BlockParts(weights, name, config, shard)
    return ScaledBlock(
        parts,
        norms=parts.norms(LayerNorm, "layernorm_before", "layernorm_after"),
        qkv=parts.fused_heads("self_attn.in_proj")
        if _fused(weights)
        else parts.separate_heads("self_attn"),
        out=parts.out("self_attn.out_proj"),
        mlp=parts.mlp(),
    )


class ViewEmbed:
    """Maps the pixels of square views to normalized patch embeddings with learned positions."""

    __slots__ = ("config", "dtype", "linear", "mean", "norm", "orders", "positions", "std")

    def __init__(self, weights: Weights, config: PerceptionConfig, rules: CropRules) -> None:
        name, hidden, patch = f"{TOWER}.embeddings", config.hidden, config.patch
        self.config, self.dtype = config, weights.dtype
        self.mean, self.std = (
            torch.tensor(each, device=weights.device) * 255.0 for each in (rules.mean, rules.std)
        )
        kernel = weights.load(Part(f"{name}.patch_embedding.weight", (hidden, 3, patch, patch)))
        self.linear = Linear(weights.ops, DenseMatrix(kernel.view(hidden, -1)))
        learned = config.side // patch
        table = weights.load(Part(f"{name}.position_embedding.weight", (learned**2, hidden)))
        square = table.float().t().view(1, hidden, learned, learned)
        self.orders, self.positions = {}, {}
        for side in (rules.sides.crop, rules.sides.whole):
            across = side // patch
            order = send(view_places(across)[1], weights.device)
            fitted = F.interpolate(square, size=(across, across), mode="bilinear")
            self.orders[side] = order
            self.positions[side] = fitted[0].flatten(1).t()[order].to(table.dtype)
        self.norm = LayerNorm(weights, f"{TOWER}.pre_layernorm", hidden, config.norm_eps)

    def __call__(self, views: torch.Tensor) -> torch.Tensor:
        """Map uint8 [V, side, side, 3] -> [V * patches, hidden]."""
        count, side = views.shape[:2]
        pixels = views.reshape(count * side, side, 3)
        cut = patchify(pixels, self.config.patch, 1, 1, self.mean, self.std, self.dtype)
        rows = self.linear(cut).view(count, -1, self.config.hidden)
        rows = rows.index_select(1, self.orders[side]) + self.positions[side]
        return self.norm(rows.flatten(0, 1))


class PerceptionTower:
    """Encodes uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`.

    A patch's position is its column and row, which rotate it, and its view's width in patches.
    """

    __slots__ = (
        "convolutions",
        "depth",
        "device",
        "hidden",
        "layers",
        "longest_segments",
        "patch",
        "projector",
        "rope",
        "rules",
        "view_embed",
    )

    axes = 3

    def __init__(
        self, weights: Weights, config: PerceptionConfig, rules: CropRules, shard: Shard
    ) -> None:
        self.device = weights.device
        self.rules, self.patch = rules, config.patch
        self.hidden, self.depth = config.hidden, config.depth
        hidden = config.hidden
        self.longest_segments = (max(rules.view_patches((1, 1))),)
        self.view_embed = ViewEmbed(weights, config, rules)
        self.layers = [
            perception_block(weights, f"{TOWER}.layers.{i}", config, shard)
            for i in range(config.depth)
        ]
        self.convolutions = [
            HalvingConvolution(
                weights, f"{TOWER}.downsampler{i + 1}", (hidden << i, hidden << i + 1), HALVINGS - i
            )
            for i in range(HALVINGS)
        ]
        column = Column("multi_modal_projector", config.out_hidden, UNSHARDED)
        # Replicated on every rank: a sharded output would have to be gathered at once.
        self.projector = Linear.columns(
            weights, [column], hidden << HALVINGS, bias=config.projector_bias
        )
        self.rope = AxialRope(
            weights,
            config.head_dim,
            config.theta,
            config.side // config.patch,
            # The Hub's files rotate adjacent values as pairs, transformers' rotate halves.
            pairs="neighbours" if _fused(weights) else "halves",
        )

    def rows(self, patches: int) -> int:
        return patches // REDUCTION**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        patches = self.rules.view_patches(grid)
        places = [view_places(math.isqrt(count))[0] for count in patches]
        columns = send(np.ascontiguousarray(np.concatenate(places, axis=1)), self.device)
        return GridFacts(columns, segments=(tuple(patches),))

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        """Map a canvas to rows: the rows of its crops, row by row, then the rows of the whole
        image.
        """
        if len(facts.segments[0]) == 1:
            return self.view_embed(pixels[None])
        crop, whole = self.rules.sides.crop, self.rules.sides.whole
        count, height = len(facts.segments[0]) - 1, len(pixels) - whole
        columns = count * crop // height
        crops = pixels[:height, : columns * crop].view(-1, crop, columns, crop, 3)
        parts = crops.transpose(1, 2).flatten(0, 1), pixels[None, height:, :whole]
        return torch.cat([self.view_embed(part) for part in parts])

    def blocks(self, pack: Pack) -> Pieces:
        x = yield from run_blocks(self.layers, pack, self.rope.rotation(pack.places[:2]))
        places = pack.places
        for convolution in self.convolutions:
            x, places = convolution(x, places)
        return self.projector(x)

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings into one tensor per image. The views of an image are contiguous."""
        return copy_images(self, embeddings, facts)


def _fused(weights: Weights) -> bool:
    """Return True if the files have the Hub's layout, in which each block has one tensor for its
    QKV weights.
    """
    return weights.has(f"{TOWER}.layers.0.self_attn.in_proj.weight")
