"""How often each image was shown lately, even if its embedding is gone. Owns a bounded number of
counts.

Counts are halved regularly, so that popularity fades. `MAX_USES_COUNTED` caps each count. Beyond
this bound the last use decides, or an image shown all day yesterday would outlive today's (figures
in decision 016).
"""

from __future__ import annotations

from saccade.core.types import ImageKey

MAX_USES_COUNTED = 8.0
USES_PER_CACHED_IMAGE = 10
"""Uses per cached image after which counts are halved."""
MIN_CACHED_IMAGES = 100
"""Fewer cached images count as this many."""


class Popularity:
    """Counts of uses. `use` adds one, and `of` returns a count from 1 to `MAX_USES_COUNTED`."""

    def __init__(self) -> None:
        self._counts: dict[ImageKey, float] = {}
        self._since = 0

    def __len__(self) -> int:
        return len(self._counts)

    def use(self, key: ImageKey, cached: int) -> None:
        """Count a sequence that shows `key`, while `cached` images are cached.

        At most `USES_PER_CACHED_IMAGE` keys per cached one are added between two halvings.
        """
        self._counts[key] = self._counts.get(key, 0.0) + 1.0
        self._since += 1
        if self._since >= USES_PER_CACHED_IMAGE * max(MIN_CACHED_IMAGES, cached):
            self._since = 0
            self._counts = {key: uses / 2 for key, uses in self._counts.items() if uses >= 1.0}

    def of(self, key: ImageKey) -> float:
        return min(MAX_USES_COUNTED, max(1.0, self._counts.get(key, 0.0)))
