"""Blocks of vision encoders: attention, then an MLP, each on normalised rows and with a residual.
Also the merger that makes tokens of the last block's rows.

A family defines the names of a block's tensors, and how its attention's rows are computed. A
block's work comes in pieces, so that an encoding can pause between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.rotary import Pairs, Rotation, rotary_tables, section_axes
from saccade.kernels.reference.segments import TowerAttention
from saccade.nn.linear import Column, Linear, RowLinear
from saccade.nn.mlp import MLP
from saccade.nn.norm import LayerNorm, RMSNorm
from saccade.nn.protocol import Cut, Pack, Pieces
from saccade.nn.shapes import BlocksConfig
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard

PROJECTION = 4
"""A block's projection to queries, keys and values is about this part of its cost, or less."""
Layer = Callable[[torch.Tensor], torch.Tensor]
Norm = LayerNorm | RMSNorm


class BlockParts:
    """Loads the parts of one block, whose tensors' names begin with `name`."""

    __slots__ = ("config", "heads", "name", "shard", "weights")

    def __init__(self, weights: Weights, name: str, config: BlocksConfig, shard: Shard) -> None:
        self.weights, self.name, self.config, self.shard = weights, name, config, shard
        self.heads = shard.divide(config.heads, "vision attention heads")

    def norms(self, kind: type[Norm], *parts: str) -> list[Norm]:
        """Load the norms before attention and MLP."""
        hidden, eps = self.config.hidden, self.config.norm_eps
        return [kind(self.weights, f"{self.name}.{part}", hidden, eps) for part in parts]

    def separate_heads(self, part: str, *, bias: bool = True) -> Linear:
        """Load queries, keys and values, stored as three tensors."""
        hidden = self.config.hidden
        columns = [Column(f"{self.name}.{part}.{each}_proj", hidden, self.shard) for each in "qkv"]
        return Linear.columns(self.weights, columns, hidden, bias=bias)

    def fused_heads(self, part: str, *, bias: bool = True) -> Linear:
        """Load queries, keys and values, stored as one tensor."""
        name, hidden = f"{self.name}.{part}", self.config.hidden
        return Linear.fused_columns(self.weights, name, hidden, 3, hidden, self.shard, bias=bias)

    def out(self, part: str, *, bias: bool = True) -> RowLinear:
        """Load attention's output projection."""
        name, hidden = f"{self.name}.{part}", self.config.hidden
        return RowLinear(self.weights, name, hidden, hidden, self.shard, bias=bias)

    def mlp(self, up: str = "mlp.fc1", down: str = "mlp.fc2") -> MLP:
        """Load an MLP without a gate."""
        config, names = self.config, (f"{self.name}.{up}", f"{self.name}.{down}")
        sizes = config.hidden, config.intermediate, config.hidden
        return MLP(self.weights, names, sizes, config.activation, self.shard)

    def scales(self, *parts: str) -> list[torch.Tensor]:
        """Load a factor for each channel."""
        shape = (self.config.hidden,)
        return [self.weights.load(Part(f"{self.name}.{part}", shape)) for part in parts]


class TowerBlock:
    """A block with norms before attention and MLP."""

    __slots__ = ("heads", "mlp", "norm1", "norm2", "ops", "out", "qkv", "scale")

    def __init__(
        self, parts: BlockParts, norms: Sequence[Norm], qkv: Layer, out: Layer, mlp: Layer
    ) -> None:
        self.ops: Ops = parts.weights.ops
        self.heads, self.scale = parts.heads, parts.config.head_dim**-0.5
        self.norm1, self.norm2 = norms
        self.qkv, self.out, self.mlp = qkv, out, mlp

    def __call__(
        self,
        x: torch.Tensor,
        cuts: Sequence[Cut],
        attention: TowerAttention,
        rotations: Sequence[Rotation] = (),
    ) -> Pieces:
        """Run as `block_pieces` does. rotations: each cut's; none: heads are not rotated."""

        def project(rows: torch.Tensor, cut: int) -> torch.Tensor:
            qkv = self.qkv(self.norm1(rows)).view(len(rows), 3 * self.heads, -1)
            if rotations:
                self.ops.rotate_(rotations[cut], qkv[:, : 2 * self.heads])
            return qkv

        return block_pieces(x, cuts, attention, self.scale, project, self._finish)

    def _finish(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        y, normed = self.norm2.add_norm(rows, self.out(attended))
        return y + self.mlp(normed)


class ScaledBlock(TowerBlock):
    """A block that scales what attention and MLP add, by channel."""

    __slots__ = ("scales",)

    def __init__(
        self, parts: BlockParts, norms: Sequence[Norm], qkv: Layer, out: Layer, mlp: Layer
    ) -> None:
        super().__init__(parts, norms, qkv, out, mlp)
        self.scales = parts.scales("lambda_1", "lambda_2")

    def _finish(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        y, normed = self.norm2.add_norm(rows, self.out(attended) * self.scales[0])
        return torch.addcmul(y, self.mlp(normed), self.scales[1])


class PatchMerger:
    """Merges every `unit` contiguous rows into a token, by an MLP over their concatenation.

    norm: normalises each row, or if `late` those side by side.
    """

    __slots__ = ("late", "mlp", "norm", "unit")

    def __init__(self, unit: int, norm: Norm | None, mlp: MLP, *, late: bool = False) -> None:
        self.unit, self.norm, self.mlp, self.late = unit, norm, mlp, late

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden] to [N / unit, out]."""
        tokens = len(x) // self.unit
        if self.norm is None:
            merged = x.view(tokens, -1)
        elif self.late:
            merged = self.norm(x.view(tokens, -1))
        else:
            merged = self.norm(x).view(tokens, -1)
        return self.mlp(merged)


def load_merger(
    weights: Weights,
    names: tuple[str, str, str],
    sizes: tuple[int, int, int],
    eps: float,
    shard: Shard,
) -> PatchMerger:
    """Load a merger with LayerNorm and GELU. Every row is normalised.

    Raises CheckpointError where a tensor is missing or misshapen.

    names: of the norm and of the two products. sizes: a row's values, a token's rows, and a token's
    values.
    """
    hidden, unit, out = sizes
    norm = LayerNorm(weights, names[0], hidden, eps)
    mlp = MLP(weights, names[1:], (hidden * unit, hidden * unit, out), "gelu", shard)
    return PatchMerger(unit, norm, mlp)


class AxialRope:
    """Rotates a head's first half by a patch's place on one axis, its second by that on another.

    Both axes share one table.
    """

    __slots__ = ("axis", "cos", "looked_up", "pairs", "sin")

    def __init__(
        self, weights: Weights, head_dim: int, theta: float, longest: int, pairs: Pairs = "halves"
    ) -> None:
        """Build the table for `longest` places on an axis."""
        angles = axial_angles(head_dim // 2, theta, longest, weights.device)
        self.cos, self.sin = rotary_tables(angles.repeat(1, 2), pairs)  # [P, D]
        sections = (head_dim // 4, head_dim // 4)
        self.axis = section_axes(sections, interleaved=False).to(weights.device)
        self.pairs: Pairs = pairs
        self.looked_up = weights.ops.looks_up

    def rotation(self, places: torch.Tensor) -> Rotation:
        """Return the rotation at places [2, N]."""
        rotation = Rotation(self.cos, self.sin, places, self.axis, self.pairs)
        # Else rows would be looked up again in every layer.
        return rotation if self.looked_up else rotation.ready()


def axial_angles(size: int, theta: float, longest: int, device: torch.device) -> torch.Tensor:
    """Return the angles [longest, size / 2] of one axis, which rotates `size` values of a head."""
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return torch.arange(longest, device=device)[:, None] * (1.0 / theta**steps)


def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put tensors of rows one below another. A single one is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def block_pieces(
    x: torch.Tensor,
    cuts: Sequence[Cut],
    attention: TowerAttention,
    scale: float,
    project: Callable[[torch.Tensor, int], torch.Tensor],
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Pieces:
    """Do one block's work on x [N, hidden], cut by cut. Costs N, and returns [N, hidden].

    project: maps a cut's rows and its number to queries, keys and values [n, 3 H, D]. finish: maps
    a cut's rows and what they attended to [n, H * D] to the block's output.
    """
    projected = []
    for number, cut in enumerate(cuts):
        yield _share(cut)
        projected.append(project(x[cut.rows], number))
    qkv = together(projected)  # [N, 3 H, D]
    heads, found = qkv.shape[1] // 3, []
    for cut in cuts:
        yield cut.rows.stop - cut.rows.start - _share(cut)
        attended = attention(
            qkv[cut.rows, :heads],
            qkv[cut.keys, heads : 2 * heads],
            qkv[cut.keys, 2 * heads :],
            cut.segments,
            scale,
        )
        found.append(finish(x[cut.rows], attended.flatten(1)))
    return together(found)


def run_blocks(
    layers: Sequence[TowerBlock], pack: Pack, rotation: Rotation | None = None
) -> Pieces:
    """Run a pack through blocks that cut it alike. Returns rows [N, hidden].

    rotation: turns heads, row by row.
    """
    x, (cuts,) = pack.rows, pack.cuts
    rotations = [] if rotation is None else [rotation.part(cut.rows) for cut in cuts]
    for layer in layers:
        x = yield from layer(x, cuts, pack.attention, rotations)
    return x


def _share(cut: Cut) -> int:
    """Return the projection's share of a block's cost."""
    return (cut.rows.stop - cut.rows.start) // PROJECTION
