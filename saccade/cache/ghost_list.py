"""Images encoded before, so that a miss can give its reason.

Owns a bounded number of keys. What one salt has seen stays hidden from the others.
"""

from __future__ import annotations

from collections import OrderedDict

from saccade.core.types import ImageKey, Missed

KEYS_PER_DIGEST = 8


class GhostList:
    """The last `size` images of all salts, each with the settings of its last encodings."""

    def __init__(self, size: int = 1 << 16) -> None:
        self._size = size
        self._settings: OrderedDict[tuple[bytes, str], tuple[bytes, ...]] = OrderedDict()

    def add(self, key: ImageKey) -> None:
        """Record that `key` is being encoded."""
        image = key.digest, key.salt
        others = tuple(each for each in self._settings.pop(image, ()) if each != key.settings)
        self._settings[image] = (*others[1 - KEYS_PER_DIGEST :], key.settings)
        if len(self._settings) > self._size:
            self._settings.popitem(last=False)

    def why_missing(self, key: ImageKey) -> Missed:
        """Return why the embedding of `key` is missing."""
        settings = self._settings.get((key.digest, key.salt))
        if settings is None:
            return "never seen"
        return "evicted" if key.settings in settings else "other settings"
