"""How far reading weights is, told a few times a second. Knows nothing of who hears it."""

from __future__ import annotations

import time
from collections.abc import Callable

TELL_SECONDS = 0.2

Told = Callable[[int, int], None]
"""Hears (bytes that are read, bytes in all)."""


def untold(_done: int, _total: int) -> None:
    """For those who need no figures."""


class Gauge:
    """Counts the bytes of a checkpoint that have been read."""

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
        """All is read: what is left in the files belongs to no layer."""
        self._told(self._total, self._total)
