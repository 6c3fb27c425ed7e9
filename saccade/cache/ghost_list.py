"""Images encoded before, so that a miss can give its reason.

Owns keys only; a bounded number of them.
"""

from __future__ import annotations

from collections import OrderedDict

from saccade.core.types import ImageKey, Missed

KEYS_PER_DIGEST = 8


class GhostList:
    """The last `size` images by digest, each with the settings and salts of its last encoding."""

    def __init__(self, size: int = 1 << 16) -> None:
        self._size = size
        self._keys: OrderedDict[bytes, tuple[ImageKey, ...]] = OrderedDict()

    def add(self, key: ImageKey) -> None:
        """`key` is being encoded."""
        others = tuple(other for other in self._keys.pop(key.digest, ()) if other != key)
        self._keys[key.digest] = (*others[1 - KEYS_PER_DIGEST :], key)
        if len(self._keys) > self._size:
            self._keys.popitem(last=False)

    def why_missing(self, key: ImageKey) -> Missed:
        """The reason why the embedding of `key` is not resident."""
        keys = self._keys.get(key.digest, ())
        if key in keys:
            return "evicted"
        if any(other.salt == key.salt for other in keys):
            return "other settings"
        # A salted key stays between its owner and us.
        if ImageKey(key.digest, key.settings) in keys:
            return "other salt"
        return "never seen"
