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


FEW_ROWS = 32
"""So many rows and fewer read experts' matrices faster than they multiply them."""


class Addresses(NamedTuple):
    """Addresses of experts' matrices of `width` values each."""

    up: tuple[int, ...]
    down: tuple[int, ...]
    width: int


class Experts(NamedTuple):
    """The matrices of E experts: up [2 I, H] (the gate's outputs, then up's), down [H, I].

    On a CPU a packed matrix each; on a GPU one tensor of all, [E, ...]. places: where the memory of
    each lies, for compiled products of a few rows (`locate`).
    """

    up: Sequence[Matrix] | Stack
    down: Sequence[Matrix] | Stack
    places: Addresses | None = None


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
    # The host says which rows go where: a few dozen numbers are put in order in less time than one
    # operation on tensors takes, and the lengths are needed there anyway.
    numbers = routes.experts.flatten().tolist()
    mine = (at for at, one in enumerate(numbers) if first <= one < first + len(experts.up))
    order = sorted(mine, key=numbers.__getitem__)  # stable
    runs = [
        (expert - first, len(list(rows)))
        for expert, rows in groupby(numbers[place] for place in order)
    ]
    if experts.places is not None and len(x) <= FEW_ROWS and act == "silu":
        from saccade.kernels.x86.moe import compiled_experts

        return compiled_experts(x, routes.shares, order, runs, experts.places)
    if not order:
        return torch.zeros_like(x)
    top = routes.experts.shape[1]
    rows = x.index_select(0, torch.tensor([place // top for place in order]))
    y = _each(gate(_each(rows, experts.up, runs), act), experts.down, runs)
    whole = y.new_zeros if len(order) < len(numbers) else y.new_empty
    each = whole(len(numbers), y.shape[1]).index_copy_(0, torch.tensor(order), y)
    return (each.view(len(x), top, -1) * routes.shares.unsqueeze(-1)).sum(1)


def locate(up: Sequence[Matrix], down: Sequence[Matrix]) -> Addresses | None:
    """Where packed matrices lie, if products with them are compiled; None if they are not."""
    if not isinstance(up[0], torch.Tensor) or not device.runs_jit(up[0]):
        return None
    from saccade.kernels.x86.moe import address, reads

    ups = [each for each in up if isinstance(each, torch.Tensor) and each.is_mkldnn]
    downs = [each for each in down if isinstance(each, torch.Tensor) and each.is_mkldnn]
    if len(ups) < len(up) or len(downs) < len(down):
        return None
    if not (reads(*ups[0].shape) and reads(*downs[0].shape)):
        return None
    return Addresses(tuple(map(address, ups)), tuple(map(address, downs)), downs[0].shape[1])


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
