"""Mixture of experts: routes rows to experts, and computes the experts' MLPs.

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
    """Which experts each of T rows is sent to, and their weights in the sum.

    experts: [T, K] int64.
    shares: [T, K] in the dtype of the rows.
    """

    experts: torch.Tensor
    shares: torch.Tensor


class Sorted(NamedTuple):
    """Which rows go to which of a rank's experts, sorted by expert."""

    order: list[int]  # assignments, as row * K + index among the row's experts
    runs: list[tuple[int, int]]  # (expert, number of rows), for experts with rows
    visits: int  # number of assignments, including those to other ranks' experts


class Addresses(NamedTuple):
    """The memory addresses of experts' packed matrices, with `width` values each."""

    up: tuple[int, ...]
    down: tuple[int, ...]
    width: int


class Experts(NamedTuple):
    """The packed matrices of E experts: up [2 I, H] (with the gate's outputs first) and down [H,
    I].

    places: their addresses, for compiled kernels for small batches (`Ops.locate`).
    """

    up: Sequence[Matrix]
    down: Sequence[Matrix]
    places: Addresses | None = None


class StackedExperts(NamedTuple):
    """The matrices of all experts in two tensors [E, ...], and the activation of the gate."""

    up: Stack
    down: Stack
    act: Activation


def route(logits: torch.Tensor, top: int) -> Routes:
    """Return the `top` experts of each row according to router logits [T, E]. Their shares sum to
    1.

    This is the routing of transformers' `Qwen3VLMoeTextTopKRouter`.
    """
    shares, experts = logits.softmax(-1, dtype=torch.float32).topk(top, dim=-1)
    shares /= shares.sum(-1, keepdim=True)
    return Routes(experts, shares.to(logits.dtype))


def sort_visits(routes: Routes, first: int, count: int) -> Sorted:
    """Return which rows go to the `count` experts from index `first`, sorted by expert."""
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
    """Return the weighted sum of its experts' outputs for each row of x [T, H].

    Only this rank's experts, those in `visits`, are included.

    shares: the routing weights [T, K].
    product: multiplies rows by a matrix.
    gate: returns `act(gate) * up`, given the output of the first matmul.
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
