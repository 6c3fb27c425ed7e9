"""Linear layers, whose matrices may be sharded over ranks.

Each constructor takes the checkpoint tensors of its matrix and loads this rank's slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import Matrix, Rows
from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.linear import missing
from saccade.kernels.reference.ops import Ops
from saccade.nn.low_rank import LowRank
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard


def share(shard: Shard, start: int, n: int, what: str) -> slice:
    """Return this rank's slice of the range `[start, start + n)`.

    what: the name of the range in error messages.
    """
    mine = shard.divide(n, what)
    return slice(start + shard.rank * mine, start + (shard.rank + 1) * mine)


@dataclass(frozen=True, slots=True)
class Column:
    """A projection to `outputs` values, of which `shard` determines this rank's part."""

    name: str
    outputs: int
    shard: Shard

    def part(self, suffix: str, *inputs: int) -> Part:
        mine = share(self.shard, 0, self.outputs, f"outputs of {self.name}")
        return Part(f"{self.name}.{suffix}", (self.outputs, *inputs), (mine,))


class Linear:
    """Computes activation(x @ weight.T + bias), with `weight` packed for the device's kernels."""

    __slots__ = ("activation", "bias", "group", "low_rank", "ops", "weight")

    def __init__(
        self,
        ops: Ops,
        weight: Matrix,
        bias: torch.Tensor | None = None,
        activation: Activation = "none",
        low_rank: LowRank | None = None,
    ) -> None:
        self.ops = ops
        self.low_rank = low_rank  # LoRA adapters; `None` if the layer does not support them
        self.weight = weight.ready(ops)
        # activations per scale if large batches may come quantized to 8 bits, else 0
        self.group = self.weight.rows_group()
        self.bias = bias
        self.activation = activation

    def __call__(self, x: Rows) -> torch.Tensor:
        if self.low_rank is None or (present := self.low_rank.active.now) is None:
            return self.weight.product(self.ops, x, self.bias, self.activation)
        y = self.weight.multiply(self.ops, x, self.bias)
        y = self.low_rank.add_to_product(self.ops, x, y, present)
        return self.ops.activate(y, self.activation)

    @classmethod
    def columns(
        cls,
        weights: Weights,
        columns: Sequence[Column],
        inputs: int,
        *,
        bias: bool,
        activation: Activation = "none",
        inner: bool = False,
    ) -> Linear:
        """Load projections of the same input as one matrix, each sharded by its outputs.

        inner: True to pad each slice with zeros if the device's kernels require it. The following
            RowLinear must be `inner`, too.
        """
        parts = [column.part("weight", inputs) for column in columns]
        biases = [column.part("bias") for column in columns] if bias else []
        return cls._of_parts(weights, parts, biases, activation, inner)

    @classmethod
    def _of_parts(
        cls,
        weights: Weights,
        parts: Sequence[Part],
        biases: Sequence[Part],
        activation: Activation = "none",
        inner: bool = False,
    ) -> Linear:
        matrix = weights.load_matrix(*parts)
        added = weights.load(*biases) if biases else None
        sizes = [part.wanted[0] for part in parts]
        more = missing(sizes[0], weights.device) if inner else 0
        if more:
            matrix = matrix.pad_outputs(sizes, more)
            if added is not None:
                added = torch.cat([F.pad(piece, (0, more)) for piece in added.split(sizes)])
        return cls(weights.ops, matrix, added, activation, weights.adapters.product(parts, more))

    @classmethod
    def fused_columns(
        cls,
        weights: Weights,
        name: str,
        outputs: int,
        pieces: int,
        inputs: int,
        shard: Shard,
        *,
        bias: bool = True,
        inner: bool = False,
    ) -> Linear:
        """Load `pieces` projections, of `outputs` values each, that are stored as one tensor.

        The other arguments are those of `columns`.
        """
        mine = [
            share(shard, piece * outputs, outputs, f"outputs of {name}") for piece in range(pieces)
        ]
        if shard.size == 1 and not (inner and missing(outputs, weights.device)):
            mine = [slice(0, pieces * outputs)]
        parts = [Part(f"{name}.weight", (pieces * outputs, inputs), (rows,)) for rows in mine]
        biases = [Part(f"{name}.bias", (pieces * outputs,), (rows,)) for rows in mine]
        return cls._of_parts(weights, parts, biases if bias else (), inner=inner)

    @classmethod
    def convolution(
        cls,
        weights: Weights,
        name: str,
        shape: tuple[int, int, int, int],
        activation: Activation = "none",
    ) -> Linear:
        """Load a convolution whose stride equals its kernel size. It is not sharded.

        The input of the layer is the concatenated patches of a token.

        shape: the shape of the tensor, (outputs, values of a patch, rows, columns).
        """
        part = Part(f"{name}.weight", shape)
        kernel = weights.load(part).permute(0, 2, 3, 1).reshape(shape[0], -1)
        bias = weights.load(Part(f"{name}.bias", shape[:1]))
        return cls(weights.ops, weights.matrix(kernel.contiguous(), part.name), bias, activation)


class RowLinear:
    """A projection that is sharded by its inputs.

    Each rank multiplies its slice, and an all-reduce sums the results, including those of adapters.
    `group` and `low_rank` are as in `Linear`.
    """

    __slots__ = ("bias", "group", "low_rank", "ops", "shard", "weight")

    def __init__(
        self,
        weights: Weights,
        name: str,
        inputs: int,
        outputs: int,
        shard: Shard,
        *,
        bias: bool,
        inner: bool = False,
    ) -> None:
        """Load this rank's slice.

        inner: True if the inputs are the outputs of an `inner` Linear.
        """
        mine = share(shard, 0, inputs, f"inputs of {name}")
        part = Part(f"{name}.weight", (outputs, inputs), (slice(None), mine))
        matrix = weights.load_matrix(part)
        more = missing(part.wanted[1], weights.device) if inner else 0
        if more:
            matrix = matrix.pad_inputs(more)
        self.low_rank = weights.adapters.product([part], inputs=more)
        self.ops = weights.ops
        self.weight = matrix.ready(weights.ops)
        self.group = self.weight.rows_group()
        self.bias = weights.load(Part(f"{name}.bias", (outputs,))) if bias else None
        self.shard = shard

    def __call__(self, x: Rows) -> torch.Tensor:
        alone = self.shard.size == 1
        y = self.weight.multiply(self.ops, x, self.bias if alone else None)
        if (present := self.low_rank.active.now) is not None:
            y = self.low_rank.add_to_product(self.ops, x, y, present)
        if alone:
            return y
        y = self.shard.all_reduce(y)
        return y if self.bias is None else y + self.bias
