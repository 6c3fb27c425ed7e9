"""Progress of reading weights, reported a few times a second. Knows nothing of the listener."""

from __future__ import annotations

import time
from collections.abc import Callable

TELL_SECONDS = 0.2

Told = Callable[[int, int], None]
"""Hears (bytes that are read, bytes in all)."""


def untold(_done: int, _total: int) -> None:
    """Ignore the progress: a gauge for readers without need of figures."""


class Gauge:
    """Counts the bytes read from a checkpoint."""

    def __init__(self, told: Told, total: int) -> None:
        self._told = told
        self._total = total
        self._done = 0
        self._at = time.monotonic()
        told(0, total)

    def update(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes read."""
        self._done += nbytes
        if (now := time.monotonic()) - self._at >= TELL_SECONDS:
            self._at = now
            self._told(min(self._done, self._total), self._total)

    def close(self) -> None:
        """Report all as read: the files' remaining tensors belong to no layer."""
        self._told(self._total, self._total)
