"""Mixtures of experts: which experts a row goes to, and the products of all rows with theirs.

Rows are put in their experts' order. Each expert that has rows is one product over them, and an
expert without rows is left alone: decoding one row reads as many experts as it goes to.
`experts.py` does the same where lengths stay on the device. Stateless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from saccade.kernels.matrix import Matrix, Stack
from saccade.kernels.reference.activation import Activation


class Routes(NamedTuple):
    """Where each of T rows goes: `experts` [T, K] int64.

    shares [T, K], in the rows' dtype: how much each counts.
    """

    experts: torch.Tensor
    shares: torch.Tensor


class Sorted(NamedTuple):
    """Visits by rows to one rank's experts, in the experts' order."""

    order: list[int]  # visits' numbers, row * K + which of the row's
    runs: list[tuple[int, int]]  # (expert, rows), for experts with rows
    visits: int  # those to all ranks' experts


class Addresses(NamedTuple):
    """Addresses of experts' matrices with `width` values each."""

    up: tuple[int, ...]
    down: tuple[int, ...]
    width: int


class Experts(NamedTuple):
    """E experts' matrices, each one packed.

    up [2 I, H] (the gate's outputs, then up's), down [H, I]. places: the address of each, for
    compiled products with a few rows (`Ops.locate`).
    """

    up: Sequence[Matrix]
    down: Sequence[Matrix]
    places: Addresses | None = None


class StackedExperts(NamedTuple):
    """All experts as one tensor [E, ...], and what gates take."""

    up: Stack
    down: Stack
    act: Activation


def route(logits: torch.Tensor, top: int) -> Routes:
    """Return each row's `top` likeliest experts by router logits [T, E]. Shares sum to one.

    As in transformers' `Qwen3VLMoeTextTopKRouter`.
    """
    shares, experts = logits.softmax(-1, dtype=torch.float32).topk(top, dim=-1)
    shares /= shares.sum(-1, keepdim=True)
    return Routes(experts, shares.to(logits.dtype))


def sort_visits(routes: Routes, first: int, count: int) -> Sorted:
    """Sort the visits to the `count` experts from number `first` on."""
    # Routed on the host: sorting a few dozen numbers takes less time than one
    # operation on tensors takes, and the lengths are needed there anyway.
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
    """Sum `share * down(gate(up))` over each row's experts, for rows x [T, H]. Returns [T, H].

    shares: [T, K].
    """
    order = visits.order
    if not order:
        return torch.zeros_like(x)
    top = shares.shape[1]

    def each(rows: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
        """Multiply each expert's rows by its matrix, back to back."""
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
