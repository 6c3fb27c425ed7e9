"""Progress of reading weights, told a few times a second. Knows nothing of the listener."""

from __future__ import annotations

import time
from collections.abc import Callable

TELL_SECONDS = 0.2

Told = Callable[[int, int], None]
"""Hears (bytes that are read, bytes in all)."""


def untold(_done: int, _total: int) -> None:
    """A gauge for readers without need of figures."""


class Gauge:
    """Counts the bytes read of a checkpoint."""

    def __init__(self, told: Told, total: int) -> None:
        self._told = told
        self._total = total
        self._done = 0
        self._at = time.monotonic()
        told(0, total)

    def update(self, nbytes: int) -> None:
        """So many more."""
        self._done += nbytes
        if (now := time.monotonic()) - self._at >= TELL_SECONDS:
            self._at = now
            self._told(min(self._done, self._total), self._total)

    def close(self) -> None:
        """All is read: the files' remaining tensors belong to no layer."""
        self._told(self._total, self._total)
