"""The experts of a layer as one tensor of all, and what rows become by theirs: what a GPU runs, in
plain PyTorch. There it is `experts_gpu.py`'s.

Owns nothing. Which experts a row goes to is `moe.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from saccade.kernels import device
from saccade.kernels.fp8 import Fp8Matrix
from saccade.kernels.linear import Matrix


class StackedExperts(NamedTuple):
    """matrix[e, o, i] = values[e, o, i] * scales[e, o, i // group].

    values: [E, out, in] in the network's dtype, or FP8. scales: float32 [E, out, groups], None
    where values are what they mean. group: inputs that share a scale.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    group: int


def stack_experts(matrices: Sequence[Matrix]) -> StackedExperts:
    """Of an expert each, of one shape. Raises TypeError where some are in 8 bits and others not, or
    their scales are of other groups.
    """
    first = matrices[0]
    if isinstance(first, torch.Tensor):
        plain = [each for each in matrices if isinstance(each, torch.Tensor)]
        if len(plain) == len(matrices):
            return StackedExperts(torch.stack(plain), None, first.shape[1])
    elif isinstance(first, Fp8Matrix):
        eight = [each for each in matrices if isinstance(each, Fp8Matrix)]
        if len(eight) == len(matrices) and len({each.group for each in eight}) == 1:
            values = torch.stack([each.values.view(torch.uint8) for each in eight])
            scales = torch.stack([each.scales for each in eight])
            return StackedExperts(values.view(first.values.dtype), scales, first.group)
    raise TypeError("the experts of a layer are in different formats")


def stacked_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    up: StackedExperts,
    down: StackedExperts,
    before: int = 0,
) -> torch.Tensor:
    """For rows x [T, H] the sum over their experts of share * down(silu(gate) * up), [T, H].

    experts: int64 [T, K], no one twice in a row; shares: [T, K]. up: [E, 2 I, H], the gate's
    outputs, then up's; down: [E, H, I]. There are `before` experts before the first of these E;
    what a row has of others adds nothing.
    """
    if device.runs_triton(x):
        # Imported where there is a GPU: elsewhere Triton need not be installed.
        from saccade.kernels.experts_gpu import launch_experts

        return launch_experts(x, experts, shares, up, down, before)
    each = x.new_zeros(*experts.shape, down.values.shape[1])
    for number in range(len(up.values)):
        rows, places = (experts == before + number).nonzero(as_tuple=True)
        gate, other = F.linear(x[rows], expert(up, number).to(x.dtype)).chunk(2, dim=-1)
        made = F.linear(F.silu(gate) * other, expert(down, number).to(x.dtype))
        each[rows, places] = made * shares[rows, places].unsqueeze(-1)
    return each.sum(1)


def expert(experts: StackedExperts, number: int) -> torch.Tensor:
    """One expert's matrix, in float32 where it is in 8 bits."""
    values = experts.values[number]
    if experts.scales is None:
        return values
    spread = experts.scales[number].repeat_interleave(experts.group, 1)[:, : values.shape[1]]
    return values.float() * spread
