"""Rate-limited warnings: one line per interval for each kind of warning, with a count.

Not thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

log = logging.getLogger("saccade")

SECONDS = 60.0


class RareWarnings:
    """Logs warnings with a rate limit. The first warning of a kind is logged at once. Later ones
    are counted, and the next line that is logged contains the count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_logged: dict[Hashable, float] = {}
        self._suppressed: dict[Hashable, int] = {}

    def warn(self, kind: Hashable, text: str) -> None:
        now = self._clock()
        if kind in self._last_logged and now - self._last_logged[kind] < SECONDS:
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return
        self._last_logged[kind] = now
        more = self._suppressed.pop(kind, 0)
        log.warning("%s%s", text, f" ({more} similar warnings suppressed)" if more else "")

    def close(self) -> None:
        """Log the counts that have not been logged yet."""
        for kind, more in self._suppressed.items():
            log.warning("%s: %d similar warnings suppressed", kind, more)
        self._suppressed.clear()
