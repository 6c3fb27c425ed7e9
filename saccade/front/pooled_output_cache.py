"""An LRU cache of pooled outputs (embeddings, scores and decisions).

A pooled output involves no sampling, so it can be reused for an identical request. Everything runs
on one event loop, so there are no locks.
"""

from __future__ import annotations

from collections import OrderedDict

from saccade.core.types import PooledOutput

ENTRY_BYTES = 256
"""Approximate memory of an entry in addition to its values, in bytes."""


class PooledOutputCache:
    """An LRU cache of pooled outputs, limited to `limit` bytes.

    `epoch` counts the calls of `clear`. An output that was computed before such a call is not
    stored after it.
    """

    def __init__(self, limit: int) -> None:
        self.epoch = 0
        self.nbytes = 0
        self._limit = limit
        self._kept: OrderedDict[bytes, PooledOutput] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: bytes) -> PooledOutput | None:
        if (found := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
        return found

    def put(self, name: bytes, pooled_output: PooledOutput, epoch: int) -> None:
        """Store a pooled output, unless the cache was cleared since `epoch`."""
        size = len(pooled_output.values) + ENTRY_BYTES
        if epoch != self.epoch or size > self._limit or name in self._kept:
            return
        self._kept[name] = pooled_output
        self.nbytes += size
        while self.nbytes > self._limit:
            _, gone = self._kept.popitem(last=False)
            self.nbytes -= len(gone.values) + ENTRY_BYTES

    def clear(self) -> None:
        """Remove all entries."""
        self._kept.clear()
        self.nbytes, self.epoch = 0, self.epoch + 1
