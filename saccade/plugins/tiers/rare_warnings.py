"""Rate-limited warnings: one line per interval for each kind, with a count.

One thread; no locks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

log = logging.getLogger("saccade")

SECONDS = 60.0


class RareWarnings:
    """Warnings with a rate limit. The first of a kind is logged at once, later ones are counted for
    the next line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[Hashable, float] = {}
        self._more: dict[Hashable, int] = {}

    def warn(self, kind: Hashable, text: str) -> None:
        now = self._clock()
        if kind in self._said and now - self._said[kind] < SECONDS:
            self._more[kind] = self._more.get(kind, 0) + 1
            return
        self._said[kind] = now
        more = self._more.pop(kind, 0)
        log.warning("%s%s", text, f" ({more} similar warnings suppressed)" if more else "")

    def close(self) -> None:
        """Log the counts still held back."""
        for kind, more in self._more.items():
            log.warning("%s: %d similar warnings suppressed", kind, more)
        self._more.clear()
