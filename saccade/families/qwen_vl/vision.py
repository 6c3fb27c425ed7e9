"""The vision encoder of Qwen-VL, for packed images of different sizes.

Qwen2-VL has LayerNorm and a plain MLP. Qwen2.5-VL has RMSNorm, a gated MLP, and window attention in
most layers. Qwen3-VL has LayerNorm, a plain MLP, learned positions that are interpolated to the
grid, and deepstack: outputs of intermediate layers are merged as additional levels. Everything that
depends only on an image's grid is computed once, as `GridFacts`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.types import Grid
from saccade.families.kit.native_images import MAX_SIDE, ImageRules
from saccade.families.qwen_vl.config import PatchEmbedding, VisionConfig
from saccade.kernels.device import send
from saccade.kernels.matrix import DenseMatrix
from saccade.kernels.reference.patchify import patchify
from saccade.nn.linear import Linear
from saccade.nn.mlp import MLP, GatedMLP
from saccade.nn.norm import LayerNorm, RMSNorm
from saccade.nn.patches import merged_order, split_images
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.tower import AxialRope, BlockParts, Layer, Norm, PatchMerger, TowerBlock
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard


def vision_block(weights: Weights, name: str, config: VisionConfig, shard: Shard) -> TowerBlock:
    """Load one block of the vision encoder.

    Raises CheckpointError if a tensor is missing or has another shape.
    """
    parts = BlockParts(weights, name, config, shard)
    return TowerBlock(
        parts,
        norms=parts.norms(_norm_kind(config), "norm1", "norm2"),
        qkv=parts.fused_heads("attn.qkv"),
        out=parts.out("attn.proj"),
        mlp=_mlp(parts, config),
    )


def patch_merger(
    weights: Weights, name: str, config: VisionConfig, shard: Shard, *, late: bool = False
) -> PatchMerger:
    """Load one merger.

    Raises CheckpointError if a tensor is missing or has another shape.

    late: as in `nn.tower.PatchMerger`.
    """
    unit, third = config.merge**2, config.variant == "qwen3_vl"
    parts = ("norm", "linear_fc1", "linear_fc2") if third else ("ln_q", "mlp.0", "mlp.2")
    normed, up, down = (f"{name}.{part}" for part in parts)
    merged = config.hidden * unit
    size = merged if late else config.hidden
    norm = _norm_kind(config)(weights, normed, size, config.norm_eps)
    mlp = MLP(weights, (up, down), (merged, merged, config.out_hidden), "gelu", shard)
    return PatchMerger(unit, norm, mlp, late=late)


class PatchEmbed:
    """Embeds patches with the checkpoint's 3D convolution.

    Its stride equals its kernel size, so it is computed as a matrix product.
    """

    __slots__ = ("config", "dtype", "linear", "mean", "std")

    def __init__(self, weights: Weights, config: VisionConfig, rules: ImageRules) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.mean, self.std = (
            torch.tensor(values, device=weights.device) * 255.0
            for values in (rules.mean, rules.std)
        )
        matrix, bias = _convolution(weights, config)
        self.linear = Linear(weights.ops, DenseMatrix(matrix), bias)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Embed pixels, uint8 [F, H, W, 3], and return rows [N, hidden].

        F is 1 for a still image, and 2 for a pair of video frames.
        """
        config = self.config
        return self.linear(
            patchify(
                pixels,
                config.patch,
                config.merge,
                config.temporal_patch,
                self.mean,
                self.std,
                self.dtype,
            )
        )


class FoldedPatchEmbed:
    """Embeds patches like `PatchEmbed`, with the normalization of pixels folded into the matrix.

    For still images, whose frames are equal, the matrix's slices for the frames are added up. For
    two different frames of a video, another matrix has the slices separately.

    The input is bytes minus 128. bfloat16 represents these values exactly, and products stay small.
    The constant part of the normalization is added in float32.
    """

    __slots__ = ("bias", "config", "dtype", "linear", "ops", "slices")

    def __init__(self, weights: Weights, config: VisionConfig, rules: ImageRules) -> None:
        matrix, bias = _convolution(weights, config)
        mean, std = (
            torch.tensor(values, device=weights.device).view(1, 3, 1) * 255.0
            for values in (rules.mean, rules.std)
        )
        # [D, 3, frames, P * P] -> [D, 3, P * P]
        slices = matrix.float().view(config.hidden, 3, config.temporal_patch, -1)
        folded = slices.sum(dim=2) / std
        self.bias = (folded * (128.0 - mean)).sum(dim=(1, 2)) + (
            0.0 if bias is None else bias.float()
        )
        self.config = config
        self.dtype = weights.dtype
        self.ops = weights.ops
        self.linear = Linear(
            weights.ops, DenseMatrix(folded.view(config.hidden, -1).to(self.dtype))
        )
        # [D, frames, 3, P * P]: a frame's bytes are contiguous
        apart = (slices / std[:, :, None]).transpose(1, 2).reshape(config.hidden, -1)
        self.slices = Linear(weights.ops, DenseMatrix(apart.to(self.dtype)))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Embed pixels, uint8 [F, H, W, 3], and return rows [N, hidden]."""
        if len(pixels) > 1 and bool((pixels[1:] == pixels[:1]).all()):
            pixels = pixels[:1]  # so that equal frames are bit-identical to the still image
        linear = self.linear if len(pixels) == 1 else self.slices
        config = self.config
        rows = self.ops.centre_patches(pixels, config.patch, config.merge, self.dtype)
        return (linear(rows) + self.bias).to(self.dtype)


def _patch_embed(
    weights: Weights, config: VisionConfig, rules: ImageRules, way: PatchEmbedding
) -> Layer:
    folded = way == "folded" or (way == "auto" and weights.ops.folds_towers)
    return (FoldedPatchEmbed if folded else PatchEmbed)(weights, config, rules)


class VisionTower:
    """Qwen-VL's vision encoder, from uint8 pixels to embeddings. Implements
    `nn.protocol.VisionNet`.
    """

    __slots__ = (
        "config",
        "deepstack",
        "depth",
        "device",
        "hidden",
        "layers",
        "longest_segments",
        "merger",
        "patch_embed",
        "position_table",
        "rope",
    )
    axes = 2

    def __init__(
        self,
        weights: Weights,
        config: VisionConfig,
        rules: ImageRules,
        shard: Shard,
        patch_embed: PatchEmbedding,
    ) -> None:
        self.device = weights.device
        self.config = config
        self.hidden, self.depth = config.hidden, config.depth
        near = ((config.window // config.patch) ** 2,) if config.window else ()
        self.longest_segments: tuple[int | None, ...] = (None, *near)
        self.patch_embed = _patch_embed(weights, config, rules, patch_embed)
        self.position_table = None
        if config.position_side:
            self.position_table = weights.load(
                Part("visual.pos_embed.weight", (config.position_side**2, config.hidden))
            )
        self.layers = [
            vision_block(weights, f"visual.blocks.{i}", config, shard) for i in range(config.depth)
        ]
        self.merger = patch_merger(weights, "visual.merger", config, shard)
        self.deepstack = {
            layer: patch_merger(
                weights, f"visual.deepstack_merger_list.{i}", config, shard, late=True
            )
            for i, layer in enumerate(config.deepstack_layers)
        }
        # Positions by row rotate the first half of a head, and by column the second half.
        self.rope = AxialRope(weights, config.head_dim, config.rope_theta, MAX_SIDE)

    def rows(self, patches: int) -> int:
        return patches // self.config.merge**2

    def blocks(self, pack: Pack) -> Pieces:
        rotation = self.rope.rotation(pack.places)
        everywhere, *windows = [
            (cuts, [rotation.part(cut.rows) for cut in cuts]) for cuts in pack.cuts
        ]
        x = pack.rows
        levels = []
        for i, layer in enumerate(self.layers):
            near = windows and i not in self.config.full_attention_layers
            cuts, rotations = windows[0] if near else everywhere
            x = yield from layer(x, cuts, pack.attention, rotations)
            if i in self.deepstack:
                levels.append(self.deepstack[i](x))
        return torch.cat([self.merger(x), *levels], dim=1) if levels else self.merger(x)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        height, width, channels = pixels.shape
        frames = height * width // (facts.num_patches * self.config.patch**2)
        x = self.patch_embed(pixels.view(frames, height // frames, width, channels))
        if facts.position_embedding is not None:
            x = x + facts.position_embedding
        if facts.order is not None:
            x = x.view(facts.order.shape[0], -1).index_select(0, facts.order).view(x.shape)
        return x

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings by image, and restore the order of tokens (row by row)."""
        return [
            part.clone() if fact.restore is None else part.index_select(0, fact.restore)
            for part, fact in zip(split_images(self, embeddings, facts), facts)
        ]

    def grid_facts(self, grid: Grid) -> GridFacts:
        _, height, width = grid
        assert max(height, width) <= MAX_SIDE, "the spec lets no longer image in"
        device, merge = self.device, self.config.merge
        row, column = merged_order(height, width, merge)
        places = np.stack((row, column))  # [2, N]
        segments: list[tuple[int, ...]] = [(height * width,)]
        order: np.ndarray | None = None
        if self.config.window:
            order, windows = window_order(
                grid, merge, self.config.window // merge // self.config.patch
            )
            places = places.reshape(2, len(order), -1)[:, order].reshape(2, -1)
            segments.append(windows)
        return GridFacts(
            places=send(places, device),
            position_embedding=self._positions(row, column, grid),
            order=None if order is None else send(order, device),
            restore=None if order is None else send(np.argsort(order), device),
            segments=tuple(segments),
        )

    def _positions(self, row: np.ndarray, column: np.ndarray, grid: Grid) -> torch.Tensor | None:
        """Return the learned positions of the grid's patches [N, hidden], or None if the model has
        none.

        They are interpolated bilinearly from the learned grid.
        """
        table = self.position_table
        if table is None:
            return None
        _, height, width = grid
        side = self.config.position_side
        corners = [
            (row_tap * side + column_tap, row_weight * column_weight)
            for row_tap, row_weight in _taps(row, height, side)
            for column_tap, column_weight in _taps(column, width, side)
        ]
        taps, shares = (send(np.stack(each), table.device) for each in zip(*corners))  # [4, N]
        total = torch.zeros(len(row), table.shape[1], device=table.device)
        for tap, share in zip(taps, shares):
            total += table.index_select(0, tap) * share[:, None]
        return total.to(table.dtype)


def _taps(place: np.ndarray, size: int, side: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return the two source indices and their weights for linear interpolation at each `place`.

    The target has `size` positions and the source has `side`. Their ends coincide.
    """
    source = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(source)
    part = source - low
    first = low.astype(np.int64)
    return (first, 1 - part), (np.minimum(first + 1, side - 1), part)


def window_order(grid: Grid, merge: int, window: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return an order of merged tokens that groups those of each window, and the windows' lengths.

    The order is [M], and lengths are in patches. Windows of equal length are consecutive, so that
    one batched call computes their attention.

    window: the side of a window in merged tokens.
    """
    rows, columns = grid[1] // merge, grid[2] // merge
    row, column = np.indices((rows, columns)).reshape(2, -1)
    across = -(-columns // window)
    number = row // window * across + column // window  # [M]: the window of each token
    counts = np.bincount(number)
    order = np.lexsort((number, -counts[number]))
    lengths = np.sort(counts)[::-1] * merge**2
    return order, tuple(lengths.tolist())


def _norm_kind(config: VisionConfig) -> type[Norm]:
    return RMSNorm if config.variant == "qwen2_5_vl" else LayerNorm


def _mlp(parts: BlockParts, config: VisionConfig) -> Layer:
    if config.variant == "qwen2_5_vl":
        name, sizes = f"{parts.name}.mlp", (config.hidden, config.intermediate)
        return GatedMLP(parts.weights, name, sizes, config.activation, parts.shard, bias=True)
    up, down = ("fc1", "fc2") if config.variant == "qwen2_vl" else ("linear_fc1", "linear_fc2")
    return parts.mlp(f"mlp.{up}", f"mlp.{down}")


def _convolution(
    weights: Weights, config: VisionConfig
) -> tuple[torch.Tensor, torch.Tensor | None]:
    kernel = (3, config.temporal_patch, config.patch, config.patch)
    matrix = weights.load(Part("visual.patch_embed.proj.weight", (config.hidden, *kernel))).view(
        config.hidden, -1
    )
    bias = (
        weights.load(Part("visual.patch_embed.proj.bias", (config.hidden,)))
        if config.variant == "qwen3_vl"
        else None
    )
    return matrix, bias
