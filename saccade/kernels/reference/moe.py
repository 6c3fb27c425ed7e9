"""Mixture of experts: routing, and the experts' MLPs.

Rows are sorted by expert, and each expert with rows takes one matmul over them. Decoding one row
thus reads only the weights of its experts. `experts.py` does the same without reading the number of
rows on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from saccade.kernels.matrix import Matrix, Stack
from saccade.kernels.reference.activation import Activation


class Routes(NamedTuple):
    """The experts of each of T rows, and their weights in the sum.

    experts: [T, K] int64. shares: [T, K] in the rows' dtype.
    """

    experts: torch.Tensor
    shares: torch.Tensor


class Sorted(NamedTuple):
    """The assignments of rows to one rank's experts, sorted by expert."""

    order: list[int]  # assignments, as row * K + index among the row's experts
    runs: list[tuple[int, int]]  # (expert, number of rows), for experts with rows
    visits: int  # number of assignments, including those to other ranks' experts


class Addresses(NamedTuple):
    """Addresses of experts' packed matrices, with `width` values each."""

    up: tuple[int, ...]
    down: tuple[int, ...]
    width: int


class Experts(NamedTuple):
    """E experts' separately packed matrices: up [2 I, H] (the gate's outputs first), down [H, I].

    places: their addresses, for compiled kernels for small batches (`Ops.locate`).
    """

    up: Sequence[Matrix]
    down: Sequence[Matrix]
    places: Addresses | None = None


class StackedExperts(NamedTuple):
    """All experts in two tensors [E, ...], and the activation of the gate."""

    up: Stack
    down: Stack
    act: Activation


def route(logits: torch.Tensor, top: int) -> Routes:
    """Return each row's `top` experts by router logits [T, E]. Their shares sum to 1.

    This is the routing of transformers' `Qwen3VLMoeTextTopKRouter`.
    """
    shares, experts = logits.softmax(-1, dtype=torch.float32).topk(top, dim=-1)
    shares /= shares.sum(-1, keepdim=True)
    return Routes(experts, shares.to(logits.dtype))


def sort_visits(routes: Routes, first: int, count: int) -> Sorted:
    """Sort the assignments to the `count` experts from index `first`."""
    # On the host, because sorting a few dozen integers is faster than one tensor operation, and
    # the host needs the numbers of rows anyway.
    numbers = routes.experts.flatten().tolist()
    mine = (index for index, one in enumerate(numbers) if first <= one < first + count)
    order = sorted(mine, key=numbers.__getitem__)  # stable
    runs = [
        (expert - first, len(list(rows)))
        for expert, rows in groupby(numbers[place] for place in order)
    ]
    return Sorted(order, runs, len(numbers))


def expert_mlp(
    x: torch.Tensor,
    shares: torch.Tensor,
    visits: Sorted,
    experts: Experts,
    product: Callable[[torch.Tensor, Matrix], torch.Tensor],
    gate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return [T, H]: for each row of x [T, H], the sum of its experts' outputs, weighted by
    `shares` [T, K], the routing weights. Only this rank's experts, those in `visits`, are included.
    """
    order = visits.order
    if not order:
        return torch.zeros_like(x)
    top = shares.shape[1]

    def each(rows: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
        """Multiply each expert's rows by its matrix, and concatenate the results."""
        lengths = [count for _, count in visits.runs]
        parts = [
            product(some, matrices[expert])
            for (expert, _), some in zip(visits.runs, rows.split(lengths))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    rows = x.index_select(0, torch.tensor([place // top for place in order]))
    y = each(gate(each(rows, experts.up)), experts.down)
    whole = y.new_zeros if len(order) < visits.visits else y.new_empty
    spread = whole(visits.visits, y.shape[1]).index_copy_(0, torch.tensor(order), y)
    return (spread.view(len(x), top, -1) * shares.unsqueeze(-1)).sum(1)
