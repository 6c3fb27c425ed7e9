"""A layer's experts, of which each row takes a few, and the router that says which.

Experts are cut among ranks by their width: each rank has a slice of every expert, and the sum over
ranks is the answer. Checkpoints keep experts fused (one tensor of all) or apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from saccade.core.errors import CheckpointError
from saccade.kernels.experts import stack_experts
from saccade.kernels.fp8 import Rows
from saccade.kernels.linear import Activation, Matrix, linear, pack, ready
from saccade.kernels.moe import Experts, expert_mlp, route, stacks
from saccade.nn.linear import share
from saccade.nn.mlp import activation
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard


@dataclass(frozen=True, slots=True)
class MoEShape:
    """`experts` gated MLPs of `width` values each, over all ranks; a row goes to `top` of them.
    outputs_first: matrices of all experts that are stored as one tensor are [out, in] each.
    """

    hidden: int
    width: int
    experts: int
    top: int
    act: str
    outputs_first: bool = False


class SparseMLP:
    """Router and experts, in place of a layer's MLP."""

    __slots__ = ("act", "experts", "router", "shard", "top")

    group = 0  # the router reads rows as they are

    def __init__(self, weights: Weights, name: str, shape: MoEShape, shard: Shard) -> None:
        self.top, self.shard, self.act = shape.top, shard, activation(shape.act)
        self.router = pack(weights.load(Part(f"{name}.gate.weight", (shape.experts, shape.hidden))))
        mine = share(shard, 0, shape.width, f"width of {name}.experts")
        fused = weights.has(f"{name}.experts.gate_up_proj")
        load = _load_fused if fused else _load_apart
        up, down = load(weights, f"{name}.experts", shape, mine)
        self.experts = _keep(up, down, self.act)

    def __call__(self, x: Rows) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        assert isinstance(x, torch.Tensor)
        routes = route(linear(x, self.router), self.top)
        y = expert_mlp(x, routes, self.experts, self.act)
        return y if self.shard.size == 1 else self.shard.all_reduce(y)


def _keep(up: list[Matrix], down: list[Matrix], act: Activation) -> Experts:
    """As their device multiplies them. Raises CheckpointError for what it cannot."""
    if not stacks(up[0]):
        return Experts([ready(each) for each in up], [ready(each) for each in down])
    if act != "silu":
        raise CheckpointError(
            f"config.json: experts with {act} are not supported on a GPU: only silu"
        )
    try:
        return Experts(stack_experts(up), stack_experts(down))
    except TypeError as error:
        raise CheckpointError(
            f"{error}, which is not supported on a GPU; use --device cpu"
        ) from error


def _load_fused(
    weights: Weights, name: str, shape: MoEShape, mine: slice
) -> tuple[list[Matrix], list[Matrix]]:
    """From `gate_up_proj` [E, H, 2 I] and `down_proj` [E, I, H], read once each; or these turned
    about.
    """
    every, width = slice(None), shape.width
    cuts = mine, slice(width + mine.start, width + mine.stop)  # of the gates, and of up
    if shape.outputs_first:
        gates = (shape.experts, 2 * width, shape.hidden)
        ups = [weights.load(Part(f"{name}.gate_up_proj", gates, (every, cut))) for cut in cuts]
        downs = (shape.experts, shape.hidden, width)
        inner = weights.load(Part(f"{name}.down_proj", downs, (every, every, mine)))
        return (
            [weights.matrix(torch.cat(both), f"{name}.gate_up_proj") for both in zip(*ups)],
            [weights.matrix(each.contiguous(), f"{name}.down_proj") for each in inner],
        )
    gates = (shape.experts, shape.hidden, 2 * width)
    halves = [
        weights.load(Part(f"{name}.gate_up_proj", gates, (every, every, columns)))
        for columns in cuts
    ]  # [E, H, I] each
    downs = (shape.experts, width, shape.hidden)
    inner = weights.load(Part(f"{name}.down_proj", downs, (every, mine)))
    return (
        [
            weights.matrix(torch.cat(both, dim=1).t().contiguous(), f"{name}.gate_up_proj")
            for both in zip(*halves)
        ],
        [weights.matrix(each.t().contiguous(), f"{name}.down_proj") for each in inner],
    )


def _load_apart(
    weights: Weights, name: str, shape: MoEShape, mine: slice
) -> tuple[list[Matrix], list[Matrix]]:
    """From three matrices for each expert."""
    up: list[Matrix] = []
    down: list[Matrix] = []
    outer, inner = (shape.width, shape.hidden), (shape.hidden, shape.width)
    for number in range(shape.experts):
        both = (f"{name}.{number}.{each}_proj.weight" for each in ("gate", "up"))
        up.append(weights.load_matrix(*(Part(each, outer, (mine,)) for each in both)))
        part = Part(f"{name}.{number}.down_proj.weight", inner, (slice(None), mine))
        down.append(weights.load_matrix(part))
    return up, down
