"""Mixture-of-experts layers, with the router that sends each row to a few experts.

Experts are sharded by width (each rank has a slice of every expert), divided among ranks (each has
some complete experts), or both. Attention's all-reduce leaves all rows on every rank, so rows are
not exchanged, and the sum over ranks is the result. Checkpoints store experts fused (one tensor for
all of them) or separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from saccade.core.errors import CheckpointError
from saccade.kernels.matrix import DenseMatrix, Matrix, Rows, Stack
from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.moe import Experts, Routes, StackedExperts
from saccade.kernels.reference.ops import Ops
from saccade.nn.linear import share
from saccade.nn.mlp import activation
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard


@dataclass(frozen=True, slots=True)
class MoEShape:
    """The sizes of a layer's experts, which are gated MLPs, over all ranks."""

    hidden: int
    width: int  # intermediate size of each expert
    experts: int  # number of experts
    top: int  # experts per row
    act: str
    # If a fused tensor fits both layouts, assume [out, in] matrices, else [in, out].
    outputs_first: bool = False


class LocalExperts(NamedTuple):
    """Which experts a rank has, and which slice of their width."""

    experts: slice
    width: slice


Kept = Sequence[Matrix] | Stack
"""The matrices of a rank's experts."""


class RoutedExperts:
    """Computes a layer's experts for rows that were already routed."""

    __slots__ = ("act", "experts", "first", "ops", "shard")

    def __init__(self, weights: Weights, name: str, shape: MoEShape, shard: Shard) -> None:
        self.shard, self.act, self.ops = shard, activation(shape.act), weights.ops
        runs, widths = shard.experts
        mine = LocalExperts(
            share(runs, 0, shape.experts, f"experts of {name}"),
            share(widths, 0, shape.width, f"width of {name}"),
        )
        self.first = mine.experts.start
        fused = weights.has(f"{name}.gate_up_proj")
        load = _load_fused if fused else _load_separate
        up, down = load(weights, name, shape, mine)
        self.experts = _pack_experts(self.ops, up, down, self.act)

    def __call__(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return the weighted sum of the routed experts' outputs for x [T, hidden], [T, hidden]."""
        experts, first = self.experts, self.first
        if isinstance(experts, StackedExperts):
            mixed = self.ops.stacked_mlp(x, *routes, experts.up, experts.down, first, experts.act)
        else:
            mixed = self.ops.expert_mlp(x, routes, experts, self.act, first)
        return self.shard.sum_parts(mixed)


class SparseMLP:
    """Routes rows to experts and computes them. It replaces a layer's MLP."""

    __slots__ = ("experts", "ops", "router", "top")

    group = 0  # the router needs unquantized rows

    def __init__(self, weights: Weights, name: str, shape: MoEShape, shard: Shard) -> None:
        self.top, self.ops = shape.top, weights.ops
        router = weights.load(Part(f"{name}.gate.weight", (shape.experts, shape.hidden)))
        self.router = DenseMatrix(router).ready(self.ops)
        self.experts = RoutedExperts(weights, f"{name}.experts", shape, shard)

    def __call__(self, x: Rows) -> torch.Tensor:
        """Route x [T, hidden] to experts, and return the weighted sum of their outputs, [T,
        hidden].
        """
        assert isinstance(x, torch.Tensor)
        routes = self.ops.route(self.router.multiply(self.ops, x), self.top)
        return self.experts(x, routes)


def _pack_experts(ops: Ops, up: Kept, down: Kept, act: Activation) -> Experts | StackedExperts:
    """Stack the experts if the device supports it, otherwise pack them one by one.

    Raises CheckpointError if their formats allow neither.
    """
    left, right = _stack(ops, up), _stack(ops, down)
    if left is not None and right is not None:
        if act not in ("silu", "gelu_tanh"):
            raise CheckpointError(
                f"config.json: hidden_act: experts on a GPU support silu and gelu_tanh, not {act}"
            )
        return StackedExperts(left, right, act)
    alone = [each for each in (up, down) if not isinstance(each, Stack)]
    if len(alone) < 2 or left is not None or right is not None:
        raise CheckpointError(
            "the experts of a layer are stored in different formats, which is not supported on "
            "GPUs; use --device cpu"
        )
    ups, downs = ([each.ready(ops) for each in matrices] for matrices in alone)
    return Experts(ups, downs, ops.locate(ups, downs))


def _stack(ops: Ops, matrices: Kept) -> Stack | None:
    return matrices if isinstance(matrices, Stack) else matrices[0].stack(matrices, ops)


def _load_fused(
    weights: Weights, name: str, shape: MoEShape, mine: LocalExperts
) -> tuple[Kept, Kept]:
    """Load `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I], which may be stored transposed."""
    up, down = f"{name}.gate_up_proj", f"{name}.down_proj"
    outer, inner = (2 * shape.width, shape.hidden), (shape.hidden, shape.width)

    def whole(turned: bool) -> tuple[Part, Part]:
        sizes = (outer[::-1], inner[::-1]) if turned else (outer, inner)
        return Part(up, (shape.experts, *sizes[0])), Part(down, (shape.experts, *sizes[1]))

    # At most one of the two is square, so only one layout fits. If none does, loading reports why.
    usual = not shape.outputs_first
    ways = (way for way in (usual, not usual) if all(map(weights.fits, whole(way))))
    turned = next(ways, usual)

    def part(of: Part, cut: slice, *, rows: bool) -> Part:
        index = (mine.experts, cut) if rows else (mine.experts, slice(None), cut)
        return replace(of, index=index)

    ups, downs = whole(turned)
    start, stop = mine.width.start, mine.width.stop
    halves = (mine.width, slice(shape.width + start, shape.width + stop))  # of gate and up
    return (
        _load_tensors(weights, [part(ups, cut, rows=not turned) for cut in halves], turned=turned),
        _load_tensors(weights, [part(downs, mine.width, rows=turned)], turned=turned),
    )


def _load_tensors(weights: Weights, parts: Sequence[Part], *, turned: bool) -> Kept:
    """Load one matrix [out, in] per expert, with the outputs of `parts` concatenated.

    turned: True if the tensors are [experts, in, out].
    """
    if (kept := weights.load_experts(parts, turned)) is not None:
        return kept
    matrices: list[Matrix] = []
    for pieces in zip(*(weights.load(part) for part in parts)):
        whole = torch.cat(pieces, dim=1).t() if turned else torch.cat(pieces)
        matrices.append(weights.matrix(whole.contiguous(), parts[0].name))
    return matrices


def _load_separate(
    weights: Weights, name: str, shape: MoEShape, mine: LocalExperts
) -> tuple[Kept, Kept]:
    up: list[Matrix] = []
    down: list[Matrix] = []
    outer, inner = (shape.width, shape.hidden), (shape.hidden, shape.width)
    for number in range(mine.experts.start, mine.experts.stop):
        both = (f"{name}.{number}.{each}_proj.weight" for each in ("gate", "up"))
        up.append(weights.load_matrix(*(Part(each, outer, (mine.width,)) for each in both)))
        part = Part(f"{name}.{number}.down_proj.weight", inner, (slice(None), mine.width))
        down.append(weights.load_matrix(part))
    return up, down
