"""The MLPs of an MoE layer whose experts are stacked in one tensor, in plain PyTorch. A GPU backend
computes the same in one kernel.

`moe.py` decides which experts each row is routed to.
"""

from __future__ import annotations

import torch

from saccade.kernels.matrix import Fp8Experts, Fp8Matrix, Stack
from saccade.kernels.reference.activation import Activation, activate
from saccade.kernels.reference.fp8 import dense
from saccade.kernels.reference.linear import linear


def stacked_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    up: Stack,
    down: Stack,
    before: int = 0,
    act: Activation = "silu",
) -> torch.Tensor:
    """Return the sum of `share * down(act(gate) * up)` over the experts of each row of x [T, H].

    The E experts start at index `before`. Experts outside this range contribute 0.

    experts: the indices of each row's experts, int64 [T, K], distinct within a row.
    shares: the routing weights, [T, K].
    up: [E, 2 I, H], with the outputs of the gate first.
    down: [E, H, I].
    """
    each = x.new_zeros(*experts.shape, expert(down, 0).shape[0])
    for number in range(count_of(up)):
        rows, places = (experts == before + number).nonzero(as_tuple=True)
        gate, other = linear(x[rows], expert(up, number).to(x.dtype)).chunk(2, dim=-1)
        made = linear(activate(gate, act) * other, expert(down, number).to(x.dtype))
        each[rows, places] = made * shares[rows, places].unsqueeze(-1)
    return each.sum(1)


def count_of(experts: Stack) -> int:
    return len(experts.values if isinstance(experts, Fp8Experts) else experts)


def expert(experts: Stack, number: int) -> torch.Tensor:
    """Return one expert's matrix, dequantized to float32 if it is in FP8."""
    if isinstance(experts, torch.Tensor):
        return experts[number]
    return dense(Fp8Matrix(experts.values[number], experts.scales[number], experts.group))
