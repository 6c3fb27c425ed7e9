"""Steps that only decode, as graphs: the language model's layers, captured at a few sizes.

Owns which steps a graph serves, its output, and the count of replays. A graph reads a step's
numbers where the batcher stages them; rows that only pad write to the dummy page and see nothing.
Knows nothing of plans beyond how many rows they have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.core.metrics import Metrics
from saccade.nn.protocol import Attention, Batch, FamilyNet
from saccade.runtime.batch import Batcher
from saccade.runtime.graphs import Capture, GraphRunner


class DecodeBuffers:
    """Where graphs of up to `largest` rows read and write; implements `graphs.Graphed`."""

    def __init__(
        self,
        net: FamilyNet,
        attention: Attention,
        batcher: Batcher,
        largest: int,
        like: torch.Tensor,
    ) -> None:
        self._net = net
        self._attention = attention
        self._batcher = batcher
        self._states = like.new_zeros((largest, net.hidden))
        self._inputs: dict[int, Batch] = {}

    def inputs(self, size: int) -> Batch:
        """When it is first asked for, the staging buffer holds nothing but padding."""
        if size not in self._inputs:
            self._inputs[size] = self._batcher.idle(size, size)
        return self._inputs[size]

    def output(self, size: int) -> torch.Tensor:
        return self._states[:size]

    def compute(self, inputs: Batch) -> torch.Tensor:
        self._attention.plan(inputs)
        return self._net.forward(inputs, self._attention)


class DecodeGraphs:
    """All of them are captured when this is made; none later."""

    def __init__(
        self, buffers: DecodeBuffers, sizes: Sequence[int], capture: Capture, metrics: Metrics
    ) -> None:
        self._metrics = metrics
        self._runner = GraphRunner(buffers, sizes, capture, "decode graphs")

    def bucket(self, rows: int) -> int:
        """Rows of the smallest graph for so many; 0: none is large enough."""
        return self._runner.bucket(rows) or 0

    def run(self, rows: int) -> torch.Tensor:
        """States [bucket, hidden] of the step that is staged, padded to its bucket; the next replay
        overwrites them.
        """
        states = self._runner.run(rows, lambda _: True)
        assert states is not None, "the step was padded to a graph"
        self._metrics.inc("saccade_graph_replays_total", rows=str(self._runner.bucket(rows)))
        return states
