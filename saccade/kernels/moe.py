"""Mixtures of experts: which experts a row goes to, and the products of all rows with theirs.

Rows are put in the order of their experts, so that each expert that has rows is one product over
them, and an expert without rows is not touched: decoding one row reads as many experts as it goes
to. On a GPU the same is `experts.py`'s, where the host knows no lengths. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from saccade.kernels import device
from saccade.kernels.experts import Stack, stacked_mlp
from saccade.kernels.layer import gate
from saccade.kernels.linear import Activation, Matrix, linear


class Routes(NamedTuple):
    """Where each of T rows goes: `experts` [T, K] int64, and how much each counts, `shares` [T, K]
    in the dtype of the rows.
    """

    experts: torch.Tensor
    shares: torch.Tensor


class Experts(NamedTuple):
    """The matrices of E experts: up [2 I, H] (the gate's outputs, then up's), down [H, I].

    On a CPU a packed matrix each; on a GPU one tensor of all, [E, ...].
    """

    up: Sequence[Matrix] | Stack
    down: Sequence[Matrix] | Stack


def route(logits: torch.Tensor, top: int) -> Routes:
    """The `top` likeliest experts of each row, by router logits [T, E]; shares sum to one.

    As in transformers' `Qwen3VLMoeTextTopKRouter`.
    """
    shares, experts = logits.softmax(-1, dtype=torch.float32).topk(top, dim=-1)
    shares /= shares.sum(-1, keepdim=True)
    return Routes(experts, shares.to(logits.dtype))


def expert_mlp(
    x: torch.Tensor, routes: Routes, experts: Experts, act: Activation, first: int = 0
) -> torch.Tensor:
    """For rows x [T, H] the sum over their experts of share * down(act(gate) * up), [T, H].

    `experts` are a run of all, which begins with number `first`; what a row has of others counts
    nothing.
    """
    if isinstance(experts.up, Stack) and isinstance(experts.down, Stack):
        assert act == "silu"
        return stacked_mlp(x, routes.experts, routes.shares, experts.up, experts.down, first)
    assert not isinstance(experts.up, Stack) and not isinstance(experts.down, Stack)
    each = _listed(x, routes.experts, experts.up, experts.down, act, first)
    return (each.view(*routes.experts.shape, -1) * routes.shares.unsqueeze(-1)).sum(1)


def _listed(
    x: torch.Tensor,
    chosen: torch.Tensor,
    up: Sequence[Matrix],
    down: Sequence[Matrix],
    act: Activation,
    first: int,
) -> torch.Tensor:
    """Each row by each of its experts `chosen` [T, K], [T K, H]; a matrix of its own for each
    expert.

    The host says which rows go where: a few dozen numbers are put in order in less time than one
    operation on tensors takes, and the lengths are needed there anyway.
    """
    numbers = chosen.flatten().tolist()
    mine = (at for at, expert in enumerate(numbers) if first <= expert < first + len(up))
    order = sorted(mine, key=numbers.__getitem__)  # stable
    if not order:
        return x.new_zeros(len(numbers), x.shape[1])
    runs = [
        (expert - first, len(list(rows)))
        for expert, rows in groupby(numbers[place] for place in order)
    ]
    top = chosen.shape[1]
    rows = x.index_select(0, torch.tensor([place // top for place in order]))
    y = _each(gate(_each(rows, up, runs), act), down, runs)
    whole = y.new_zeros if len(order) < len(numbers) else y.new_empty
    return whole(len(numbers), y.shape[1]).index_copy_(0, torch.tensor(order), y)


def _each(
    x: torch.Tensor, matrices: Sequence[Matrix], runs: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Each expert's rows by its matrix, back to back. runs: (expert, rows), of those that have
    rows.
    """
    parts = [
        linear(rows, matrices[expert])
        for (expert, _), rows in zip(runs, x.split([count for _, count in runs]))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def stacks(x: torch.Tensor) -> bool:
    """Whether experts of the device of `x` are one tensor."""
    return device.runs_triton(x)
