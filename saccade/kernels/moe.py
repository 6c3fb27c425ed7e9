"""Mixtures of experts: which experts a row goes to, and the products of all rows with theirs.

Rows are put in the order of their experts, so that each expert that has rows is one product over
them, and an expert without rows is not touched: decoding one row reads as many experts as it goes
to. On a GPU the same is `experts.py`'s. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from saccade.kernels import device
from saccade.kernels.experts import StackedExperts, stacked_mlp
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

    On a CPU a packed matrix each; on a GPU one tensor of all.
    """

    up: Sequence[Matrix] | StackedExperts
    down: Sequence[Matrix] | StackedExperts


def route(logits: torch.Tensor, top: int) -> Routes:
    """The `top` likeliest experts of each row, by router logits [T, E]; shares sum to one.

    As in transformers' `Qwen3VLMoeTextTopKRouter`.
    """
    shares, experts = logits.softmax(-1, dtype=torch.float32).topk(top, dim=-1)
    shares /= shares.sum(-1, keepdim=True)
    return Routes(experts, shares.to(logits.dtype))


def expert_mlp(x: torch.Tensor, routes: Routes, experts: Experts, act: Activation) -> torch.Tensor:
    """For rows x [T, H] the sum over their experts of share * down(act(gate) * up), [T, H]."""
    if isinstance(experts.up, StackedExperts):
        assert isinstance(experts.down, StackedExperts) and act == "silu"
        return stacked_mlp(x, routes.experts, routes.shares, experts.up, experts.down)
    assert not isinstance(experts.down, StackedExperts)
    order = routes.experts.flatten().argsort(stable=True)  # [T K], by expert
    rows = x.index_select(0, order // routes.experts.shape[1])
    owners = routes.experts.flatten().index_select(0, order)
    runs = _runs(owners)
    y = _each(gate(_each(rows, experts.up, runs), act), experts.down, runs)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    each = y.index_select(0, back).view(*routes.experts.shape, -1)  # [T, K, H]
    return (each * routes.shares.unsqueeze(-1)).sum(1)


def _runs(owners: torch.Tensor) -> list[tuple[int, int]]:
    """(expert, rows) of those that have rows, by expert; owners [N] ascending."""
    numbers, counts = owners.unique_consecutive(return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist()))


def _each(
    x: torch.Tensor, matrices: Sequence[Matrix], runs: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Each expert's rows by its matrix, back to back."""
    parts, start = [], 0
    for expert, count in runs:
        parts.append(linear(x[start : start + count], matrices[expert]))
        start += count
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def stacks(matrix: Matrix) -> bool:
    """Whether experts that lie where `matrix` does are one tensor."""
    return device.runs_triton(matrix if isinstance(matrix, torch.Tensor) else matrix[0])
