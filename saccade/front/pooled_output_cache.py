"""Recent readings of prompts, by name. A reading involves no sampling, so a repeated question gets
the same answer.

Owns the kept bytes, and chooses the next to go. One event loop, without locks.
"""

from __future__ import annotations

from collections import OrderedDict

from saccade.core.types import PooledOutput

ENTRY_BYTES = 256
"""Bytes of an entry beside its values."""


class PooledOutputCache:
    """Keeps up to `limit` bytes of readings. The least recently used go first.

    epoch: counts flushes. Readings begun before a flush are dropped after it.
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
        """Keep a reading, unless a flush came after `epoch`."""
        size = len(pooled_output.values) + ENTRY_BYTES
        if epoch != self.epoch or size > self._limit or name in self._kept:
            return
        self._kept[name] = pooled_output
        self.nbytes += size
        while self.nbytes > self._limit:
            _, gone = self._kept.popitem(last=False)
            self.nbytes -= len(gone.values) + ENTRY_BYTES

    def clear(self) -> None:
        """Forget all readings."""
        self._kept.clear()
        self.nbytes, self.epoch = 0, self.epoch + 1
