"""Steps of a few rows with one token each, recorded at the first of their size and repeated from
then on (`Ops.record`): one row alone would cost more Python than products.

Owns the recordings and the choice of steps. A recording reads the batch at its fixed address, and
leaves states and logits where the next step overwrites them.
"""

from __future__ import annotations

import torch

from saccade.kernels.reference.ops import Recorded
from saccade.nn.protocol import Batch, FamilyNet
from saccade.runtime.attention import PagedAttention

MOST_ROWS = 8
"""More rows hide what Python costs, and each size has memory of its own."""


class RecordedSteps:
    """The language model's steps by their rows and draws. replays: how many were repeated."""

    def __init__(self, net: FamilyNet, attention: PagedAttention) -> None:
        self._net = net
        self._attention = attention
        self._made: dict[tuple[int, int], Recorded | None] = {}
        self.replays = 0

    def run(self, batch: Batch) -> tuple[torch.Tensor, ...] | None:
        """Compute (states [T, hidden], logits [D, V] float32), or return `None` if this is no such
        step. Logits are left out if no row draws.
        """
        rows, draws = len(batch.slots), len(batch.sample_rows)
        if rows > MOST_ROWS or batch.adapters or not self._attention.repeats(batch):
            return None
        if (rows, draws) not in self._made:
            self._attention.plan(batch)
            made = self._made[rows, draws] = self._net.ops.record(lambda: self._compute(batch))
        elif (made := self._made[rows, draws]) is not None:
            if self._net.head is not None:
                self._attention.plan(batch)  # for what drafts behind this step
            made.replay()
            self.replays += 1
        return None if made is None else made.results

    def _compute(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        states = self._net.forward(batch, self._attention)
        if not len(batch.sample_rows):
            return (states,)
        drawn = states  # where all rows draw, these are the rows in order
        if len(batch.sample_rows) < len(states):
            drawn = states.index_select(0, batch.sample_rows)
        return states, self._net.logits(drawn)
