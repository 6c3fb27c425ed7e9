"""Gemma 4's vision encoder, for packed images of any size.

It has learned and rotary positions on two axes, and norms before and after attention and MLP. A
token is the mean of its patches. RoPE rotates the first half of a head by the patch's column, and
the second half by its row. Tensors that depend only on an image's grid are in its `GridFacts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from saccade.core.types import Grid
from saccade.kernels.device import send
from saccade.kernels.matrix import DenseMatrix
from saccade.kernels.reference.patchify import patchify
from saccade.kernels.reference.rotary import Rotation, rotary_tables
from saccade.kernels.reference.segments import TowerAttention
from saccade.nn.linear import Column, Linear, RowLinear
from saccade.nn.mlp import activation
from saccade.nn.norm import RMSNorm
from saccade.nn.patches import copy_images, merged_order
from saccade.nn.protocol import Cut, GridFacts, Pack, Pieces
from saccade.nn.tower import axial_angles, block_pieces
from saccade.nn.weights import Part, Weights
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins.models.gemma4.config import TowerConfig
from saccade.plugins.models.gemma4.images import BUDGETS

TOWER = "vision_tower"
HALF = 127.5
"""Mean and standard deviation of bytes, which scale pixels to the range from -1 to 1."""


class Axes(NamedTuple):
    """The rotations of patches by their column and by their row."""

    column: Rotation
    row: Rotation

    def part(self, rows: slice) -> Axes:
        return Axes(self.column.part(rows), self.row.part(rows))


class ClippedLinear:
    """A linear layer that clamps its inputs and outputs if the checkpoint contains limits
    for them.
    """

    __slots__ = ("inputs", "outputs", "product")

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: TowerConfig,
        make: Callable[[str], Linear | RowLinear],
    ) -> None:
        """Create the layer by calling `make` with its name, and load its limits."""
        self.product = make(f"{name}.linear")
        self.inputs: tuple[float, float] | None = None
        self.outputs: tuple[float, float] | None = None
        if config.clipped:
            self.inputs, self.outputs = (
                (_limit(weights, f"{name}.{side}_min"), _limit(weights, f"{name}.{side}_max"))
                for side in ("input", "output")
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, in] to [N, out]."""
        if self.inputs is None or self.outputs is None:
            return self.product(x)
        return self.product(x.clamp(*self.inputs)).clamp_(*self.outputs)


def _limit(weights: Weights, name: str) -> float:
    return weights.load(Part(name, (), limit=True)).item()


class TowerMLP:
    """Computes down(act(gate(x)) * up(x))."""

    __slots__ = ("act", "down", "gate", "ops", "up")

    def __init__(self, weights: Weights, name: str, config: TowerConfig, shard: Shard) -> None:
        hidden, inner = config.hidden, config.intermediate

        def wide(each: str) -> Linear:
            return Linear.columns(weights, [Column(each, inner, shard)], hidden, bias=False)

        def narrow(each: str) -> RowLinear:
            return RowLinear(weights, each, inner, hidden, shard, bias=False)

        self.gate, self.up = (
            ClippedLinear(weights, f"{name}.{each}_proj", config, wide) for each in ("gate", "up")
        )
        self.down = ClippedLinear(weights, f"{name}.down_proj", config, narrow)
        self.act, self.ops = activation(config.activation), weights.ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden] to [N, hidden]."""
        return self.down(self.ops.activate(self.gate(x), self.act).mul_(self.up(x)))


class Gemma4Block:
    """A block of attention and an MLP, each with norms before and after, and a residual
    connection.
    """

    __slots__ = (
        "dim",
        "mixed_norm",
        "mlp",
        "mlp_norm",
        "norm",
        "ops",
        "out",
        "out_norm",
        "projections",
    )

    def __init__(self, weights: Weights, name: str, config: TowerConfig, shard: Shard) -> None:
        hidden, attention, self.dim = config.hidden, f"{name}.self_attn", config.heads.dim
        inner = config.heads.count * self.dim

        def norm(part: str) -> RMSNorm:
            return RMSNorm(weights, f"{name}.{part}", hidden, config.norm_eps)

        def wide(each: str) -> Linear:
            return Linear.columns(weights, [Column(each, inner, shard)], hidden, bias=False)

        def narrow(each: str) -> RowLinear:
            return RowLinear(weights, each, inner, hidden, shard, bias=False)

        self.norm = norm("input_layernorm")
        shard.divide(config.heads.count, "vision attention heads")
        norms: list[RMSNorm | UnitNorm] = [
            *(
                RMSNorm(weights, f"{attention}.{each}_norm", self.dim, config.norm_eps)
                for each in "qk"
            ),
            UnitNorm(weights, self.dim, config.norm_eps),
        ]
        self.projections = [
            (ClippedLinear(weights, f"{attention}.{each}_proj", config, wide), of_heads)
            for each, of_heads in zip("qkv", norms, strict=True)
        ]
        self.out = ClippedLinear(weights, f"{attention}.o_proj", config, narrow)
        self.mixed_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp = TowerMLP(weights, f"{name}.mlp", config, shard)
        self.out_norm = norm("post_feedforward_layernorm")
        self.ops = weights.ops

    def __call__(
        self,
        x: torch.Tensor,
        rotations: Sequence[Axes],
        cuts: Sequence[Cut],
        attention: TowerAttention,
    ) -> Pieces:
        """Run as `nn.patches.block_pieces` does, with one rotation per cut."""

        def project(rows: torch.Tensor, cut: int) -> torch.Tensor:
            return self._project(rows, rotations[cut])

        return block_pieces(x, cuts, attention, 1.0, project, self._finish)

    def _finish(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        y, normed = self.mlp_norm.add_norm(rows, self.mixed_norm(self.out(attended)))
        return y + self.out_norm(self.mlp(normed))

    def _project(self, x: torch.Tensor, rotation: Axes) -> torch.Tensor:
        normed = self.norm(x)
        qkv = torch.cat(
            [
                of_heads(product(normed).unflatten(1, (-1, self.dim)))
                for product, of_heads in self.projections
            ],
            dim=1,
        )
        rotated, half = qkv[:, : 2 * qkv.shape[1] // 3], self.dim // 2
        self.ops.rotate_(rotation.column, rotated[..., :half])
        self.ops.rotate_(rotation.row, rotated[..., half:])
        return qkv


class UnitNorm:
    """RMS norm without weights."""

    __slots__ = ("eps", "ones", "ops")

    def __init__(self, weights: Weights, size: int, eps: float) -> None:
        self.ones = torch.ones(size, dtype=weights.dtype, device=weights.device)
        self.eps, self.ops = eps, weights.ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., size]."""
        return self.ops.rms_norm(x, self.ones, self.eps)


class Connector:
    """Averages patches into tokens, then rescales, normalizes and projects them.

    Replicated on every rank.
    """

    __slots__ = ("merge", "norm", "project", "root", "standard")

    def __init__(self, weights: Weights, config: TowerConfig) -> None:
        hidden = config.hidden
        self.merge, self.root = config.merge**2, hidden**0.5
        self.standard: tuple[torch.Tensor, ...] | None = None
        if config.standardised:
            names = f"{TOWER}.std_bias", f"{TOWER}.std_scale"
            self.standard = tuple(weights.load(Part(name, (hidden,))).float() for name in names)
        self.norm = UnitNorm(weights, hidden, config.norm_eps)
        column = Column("embed_vision.embedding_projection", config.out, UNSHARDED)
        self.project = Linear.columns(weights, [column], hidden, bias=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden] to [M, out]."""
        pooled = x.view(-1, self.merge, x.shape[1]).float().mean(1).to(x.dtype)
        tokens = pooled.float() * self.root
        if self.standard is not None:
            bias, scale = self.standard
            tokens = (tokens - bias) * scale
        return self.project(self.norm(tokens.to(x.dtype)))


class Gemma4Tower:
    """Encodes uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`."""

    __slots__ = (
        "axis_cos",
        "axis_sin",
        "bytes_scale",
        "config",
        "connector",
        "depth",
        "hidden",
        "layers",
        "linear",
        "ops",
        "positions",
    )
    axes = 2
    longest_segments = (None,)

    def __init__(self, weights: Weights, config: TowerConfig, shard: Shard) -> None:
        self.config, self.ops, device = config, weights.ops, weights.device
        self.hidden, self.depth = config.hidden, config.depth
        self.bytes_scale = torch.full((3,), HALF, device=device)
        name, patch, hidden = f"{TOWER}.patch_embedder", config.patch, config.hidden
        matrix = weights.load(Part(f"{name}.input_proj.weight", (hidden, 3 * patch**2)))
        planes = matrix.view(hidden, patch**2, 3).transpose(1, 2).reshape(hidden, -1)
        self.linear = Linear(weights.ops, DenseMatrix(planes.contiguous()))
        table = Part(f"{name}.position_embedding_table", (2, config.places, hidden))
        self.positions = weights.load(table)  # of columns, of rows
        self.layers = [
            Gemma4Block(weights, f"{TOWER}.encoder.layers.{i}", config, shard)
            for i in range(config.depth)
        ]
        self.connector = Connector(weights, config)
        heads, longest = config.heads, BUDGETS[-1] * config.merge
        angles = axial_angles(heads.dim // 2, heads.theta, longest, device)  # [P, D / 4]
        self.axis_cos, self.axis_sin = rotary_tables(angles)  # [P, D / 2]

    def rows(self, patches: int) -> int:
        return patches // self.config.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        merge, device = self.config.merge, self.positions.device
        row, column = merged_order(grid[0] * merge, grid[1] * merge, merge)
        places = send(np.stack((column, row)), device)  # [2, N]
        across, down = (table[place] for table, place in zip(self.positions, places))
        return GridFacts(places, segments=((len(row),),), position_embedding=across + down)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        config, scale, dtype = self.config, self.bytes_scale, self.positions.dtype
        patches = patchify(pixels, config.patch, config.merge, 1, scale, scale, dtype)
        assert facts.position_embedding is not None
        return self.linear(patches) + facts.position_embedding

    def blocks(self, pack: Pack) -> Pieces:
        x, (cuts,) = pack.rows, pack.cuts
        column, row = (
            Rotation(self.axis_cos, self.axis_sin, pack.places[axis : axis + 1]).ready()
            for axis in range(2)
        )
        rotations = [Axes(column, row).part(cut.rows) for cut in cuts]
        for layer in self.layers:
            x = yield from layer(x, rotations, cuts, pack.attention)
        return self.connector(x)

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split [M, out] into one [m, out] per image, in the same order."""
        return copy_images(self, embeddings, facts)
