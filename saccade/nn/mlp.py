"""MLPs of transformer layers, and the activations that checkpoints name.

All of these activations map zero to zero, so zero padding of the intermediate values has no effect.
"""

from __future__ import annotations

import torch

from saccade.core.errors import CheckpointError
from saccade.kernels.matrix import Rows
from saccade.kernels.reference.activation import Activation
from saccade.nn.linear import Column, Linear, RowLinear
from saccade.nn.weights import Weights
from saccade.parallel import Shard

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}


def activation(name: str) -> Activation:
    """Return the activation that a checkpoint calls `name`.

    Raises CheckpointError, which lists the supported names.
    """
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act {name!r} is not supported (supported: "
            f"{', '.join(ACTIVATIONS)})"
        )
    return ACTIVATIONS[name]


class MLP:
    """Computes down(act(up(x))).

    names: the names of up and down.
    sizes: the numbers of inputs, intermediate values and outputs.
    """

    __slots__ = ("down", "up")

    def __init__(
        self,
        weights: Weights,
        names: tuple[str, str],
        sizes: tuple[int, int, int],
        act: str,
        shard: Shard,
        *,
        bias: bool = True,
    ) -> None:
        inputs, within, outputs = sizes
        self.up = Linear.columns(
            weights,
            [Column(names[0], within, shard)],
            inputs,
            bias=bias,
            activation=activation(act),
            inner=True,
        )
        self.down = RowLinear(weights, names[1], within, outputs, shard, bias=bias, inner=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class GatedMLP:
    """Computes down(act(gate(x)) * up(x)). Gate and up share one matrix."""

    __slots__ = ("act", "down", "gate_up", "group", "ops")

    def __init__(
        self,
        weights: Weights,
        name: str,
        sizes: tuple[int, int],
        act: str,
        shard: Shard,
        *,
        bias: bool,
        fused: bool = False,
    ) -> None:
        """Load the matrices.

        sizes: the hidden size and the number of intermediate values.
        fused: True if gate and up are stored as one tensor.
        """
        hidden, intermediate = sizes
        if fused:
            self.gate_up = Linear.fused_columns(
                weights,
                f"{name}.gate_up_proj",
                intermediate,
                2,
                hidden,
                shard,
                bias=bias,
                inner=True,
            )
        else:
            columns = [
                Column(f"{name}.{each}", intermediate, shard) for each in ("gate_proj", "up_proj")
            ]
            self.gate_up = Linear.columns(weights, columns, hidden, bias=bias, inner=True)
        self.down = RowLinear(
            weights, f"{name}.down_proj", intermediate, hidden, shard, bias=bias, inner=True
        )
        self.act = activation(act)
        self.group = self.gate_up.group
        self.ops = weights.ops

    def __call__(self, x: Rows) -> torch.Tensor:
        return self.down(self.ops.gate_rows(self.gate_up(x), self.act, self.down.group))
