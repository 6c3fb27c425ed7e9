"""Stores the states of linear attention and of the convolutions before it, whose size does not
depend on a sequence's length.

The scheduler decides which states are stored. A line of the memory has the states of one sequence
for all layers. The first lines belong to the worker's slots, and steps update them. The others are
snapshots, which only `copy` changes, or states after draft tokens (`Row.keep`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from saccade.core.family import KVSpec
from saccade.core.plan import StateCopy
from saccade.kernels.device import send
from saccade.kernels.reference.delta import StateRows
from saccade.kernels.reference.ops import Ops
from saccade.nn.protocol import Batch, DeltaInputs

StateLayers = Mapping[int, Mapping[str, torch.Tensor]]
"""States by layer and by name, for layers that have states: [lines, *shape]."""
ALIGNMENT = 16
"""Each layer's values in a line are aligned to this many bytes."""


class StateMemory:
    """Stores the per-sequence tensors of `spec` in one tensor, uint8 [lines, bytes].

    `layers` has views of it.
    """

    def __init__(self, spec: KVSpec, lines: int, dtype: torch.dtype, device: torch.device) -> None:
        places: list[tuple[int, str, tuple[int, ...], torch.dtype, int]] = []
        width = 0
        for layer, caches in enumerate(spec.layers):
            for cache in caches:
                if cache.per != "sequence":
                    continue
                kind = torch.float32 if cache.format == "float32" else dtype
                places.append((layer, cache.name, cache.shape, kind, width))
                width += -(-math.prod(cache.shape) * kind.itemsize // ALIGNMENT) * ALIGNMENT
        # torch.empty instead of zeros, so that unused lines take no physical memory on a CPU.
        self.lines = torch.empty((lines if width else 0, width), dtype=torch.uint8, device=device)
        self.layers: dict[int, dict[str, torch.Tensor]] = {}
        for layer, name, shape, kind, start in places:
            part = self.lines[:, start : start + math.prod(shape) * kind.itemsize]
            self.layers.setdefault(layer, {})[name] = part.view(kind).unflatten(1, shape)

    @property
    def nbytes(self) -> int:
        return self.lines.nbytes

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy lines in stream order. All sources are read before any target is written."""
        written = {each.target for each in copies}
        if any(each.source in written for each in copies):
            pairs = np.array([(each.source, each.target) for each in copies])
            sources, targets = send(pairs.T.copy(), self.lines.device)
            self.lines.index_copy_(0, targets, self.lines.index_select(0, sources))
        else:  # copy directly, since a temporary copy of a line takes tens of megabytes
            for each in copies:
                self.lines[each.target].copy_(self.lines[each.source])


class StateRecurrence:
    """Computes the gated delta rule and convolutions (`nn.protocol.Recurrence`) with the states of
    a `StateMemory`.
    """

    def __init__(self, layers: StateLayers, ops: Ops) -> None:
        self._ops = ops
        self._layers = layers
        self._rows: StateRows | None = None

    def plan(self, batch: Batch) -> None:
        """Prepare for a batch. Call it once per step, before all layers."""
        rows = self._ops.state_rows(batch.q_starts, batch.kv_lengths, batch.slots, batch.singles)
        self._rows = rows.with_kept(batch.kept) if batch.kept else rows

    def __call__(self, inputs: DeltaInputs, layer: int) -> torch.Tensor:
        assert self._rows is not None, "a batch is planned first"
        states = self._layers[layer]
        memory = states["recurrent"]
        _, heads, key_dim, value_dim = memory.shape
        mixed = self._ops.causal_conv(inputs.mixed, inputs.taps, states["conv"], self._rows)
        values = heads * value_dim
        keys = (mixed.shape[1] - values) // 2
        q, k, v = mixed.split((keys, keys, values), dim=1)
        return self._ops.gated_delta(
            q.unflatten(1, (-1, key_dim)),
            k.unflatten(1, (-1, key_dim)),
            v.unflatten(1, (heads, value_dim)),
            inputs.decay,
            inputs.beta,
            memory,
            self._rows,
        )

    def convolve(self, x: torch.Tensor, taps: torch.Tensor, layer: int) -> torch.Tensor:
        assert self._rows is not None, "a batch is planned first"
        states = self._layers[layer]["conv"]
        return self._ops.causal_conv(x, taps, states, self._rows, silu=False)
