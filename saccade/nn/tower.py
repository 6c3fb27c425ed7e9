"""Transformer blocks of vision encoders, and the merger that combines rows of the last block to
tokens.

A block has pre-norm attention and an MLP, both with residual connections. A family defines the
names of a block's tensors, and how queries, keys and values are computed. A block is computed in
chunks, so that encoding can pause between them.
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
"""The QKV projection takes about 1 / PROJECTION of a block's cost, or less."""
Layer = Callable[[torch.Tensor], torch.Tensor]
Norm = LayerNorm | RMSNorm


class BlockParts:
    """Loads the layers of one block, whose tensor names start with `name`."""

    __slots__ = ("config", "heads", "name", "shard", "weights")

    def __init__(self, weights: Weights, name: str, config: BlocksConfig, shard: Shard) -> None:
        self.weights, self.name, self.config, self.shard = weights, name, config, shard
        self.heads = shard.divide(config.heads, "vision attention heads")

    def norms(self, kind: type[Norm], *parts: str) -> list[Norm]:
        """Load the norms before attention and before the MLP."""
        hidden, eps = self.config.hidden, self.config.norm_eps
        return [kind(self.weights, f"{self.name}.{part}", hidden, eps) for part in parts]

    def separate_heads(self, part: str, *, bias: bool = True) -> Linear:
        """Load queries, keys and values that are stored as three tensors."""
        hidden = self.config.hidden
        columns = [Column(f"{self.name}.{part}.{each}_proj", hidden, self.shard) for each in "qkv"]
        return Linear.columns(self.weights, columns, hidden, bias=bias)

    def fused_heads(self, part: str, *, bias: bool = True) -> Linear:
        """Load queries, keys and values that are stored as one tensor."""
        name, hidden = f"{self.name}.{part}", self.config.hidden
        return Linear.fused_columns(self.weights, name, hidden, 3, hidden, self.shard, bias=bias)

    def out(self, part: str, *, bias: bool = True) -> RowLinear:
        """Load the output projection of attention."""
        name, hidden = f"{self.name}.{part}", self.config.hidden
        return RowLinear(self.weights, name, hidden, hidden, self.shard, bias=bias)

    def mlp(self, up: str = "mlp.fc1", down: str = "mlp.fc2") -> MLP:
        """Load an MLP without a gate."""
        config, names = self.config, (f"{self.name}.{up}", f"{self.name}.{down}")
        sizes = config.hidden, config.intermediate, config.hidden
        return MLP(self.weights, names, sizes, config.activation, self.shard)

    def scales(self, *parts: str) -> list[torch.Tensor]:
        """Load vectors of scale factors, one factor per channel."""
        shape = (self.config.hidden,)
        return [self.weights.load(Part(f"{self.name}.{part}", shape)) for part in parts]


class TowerBlock:
    """A block with a norm before attention and a norm before the MLP."""

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
        """Compute the block as `block_pieces` does.

        rotations: one per cut. If empty, RoPE is not applied.
        """

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
    """A block that scales the outputs of attention and MLP by channel (LayerScale)."""

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
    """Merges every `unit` consecutive rows into a token, with an MLP over their concatenation.

    norm: applied to each row, or to the concatenation if `late`.
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
    """Load a merger with LayerNorm on each row and GELU.

    Raises CheckpointError if a tensor is missing or has the wrong shape.

    names: the names of the norm and of the two matrices.
    sizes: the hidden size, the rows per token, and the values per token.
    """
    hidden, unit, out = sizes
    norm = LayerNorm(weights, names[0], hidden, eps)
    mlp = MLP(weights, names[1:], (hidden * unit, hidden * unit, out), "gelu", shard)
    return PatchMerger(unit, norm, mlp)


class AxialRope:
    """2D RoPE, which rotates the first half of a head by the patch's row, and the second by its
    column.

    Both axes share one table.
    """

    __slots__ = ("axis", "cos", "looked_up", "pairs", "sin")

    def __init__(
        self, weights: Weights, head_dim: int, theta: float, longest: int, pairs: Pairs = "halves"
    ) -> None:
        """Build the table for positions 0 to `longest` - 1 on each axis."""
        angles = axial_angles(head_dim // 2, theta, longest, weights.device)
        self.cos, self.sin = rotary_tables(angles.repeat(1, 2), pairs)  # [P, D]
        sections = (head_dim // 4, head_dim // 4)
        self.axis = section_axes(sections, interleaved=False).to(weights.device)
        self.pairs: Pairs = pairs
        self.looked_up = weights.ops.looks_up

    def rotation(self, places: torch.Tensor) -> Rotation:
        """Return the rotation for positions [2, N]."""
        rotation = Rotation(self.cos, self.sin, places, self.axis, self.pairs)
        # Looked up here unless the kernel does so, to avoid a lookup in every layer.
        return rotation if self.looked_up else rotation.ready()


def axial_angles(size: int, theta: float, longest: int, device: torch.device) -> torch.Tensor:
    """Return the angles [longest, size / 2] for one axis that rotates `size` values of a head."""
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return torch.arange(longest, device=device)[:, None] * (1.0 / theta**steps)


def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along the first dimension. A single one is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def block_pieces(
    x: torch.Tensor,
    cuts: Sequence[Cut],
    attention: TowerAttention,
    scale: float,
    project: Callable[[torch.Tensor, int], torch.Tensor],
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Pieces:
    """Compute one block on x [N, hidden], chunk by chunk, and return [N, hidden].

    Yields the cost of each chunk before it is computed. The sum of costs is N.

    project: maps a chunk's rows and its index to queries, keys and values [n, 3 H, D].
    finish: maps the rows of a chunk and the output of attention [n, H * D] to the output of the
        block.
    """
    projected = []
    for number, cut in enumerate(cuts):
        yield _projection_cost(cut)
        projected.append(project(x[cut.rows], number))
    qkv = together(projected)  # [N, 3 H, D]
    heads, found = qkv.shape[1] // 3, []
    for cut in cuts:
        yield cut.rows.stop - cut.rows.start - _projection_cost(cut)
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
    """Compute blocks that all use the same cuts on a pack, and return rows [N, hidden].

    rotation: the RoPE rotation of each row, or None.
    """
    x, (cuts,) = pack.rows, pack.cuts
    rotations = [] if rotation is None else [rotation.part(cut.rows) for cut in cuts]
    for layer in layers:
        x = yield from layer(x, cuts, pack.attention, rotations)
    return x


def _projection_cost(cut: Cut) -> int:
    return (cut.rows.stop - cut.rows.start) // PROJECTION
