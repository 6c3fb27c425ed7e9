"""A dictionary that remembers the most recently used entries only."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(Generic[K, V]):
    """At most `size` entries; `get`, `put` and `in` count as use."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        if key not in self._entries:
            return False
        self._entries[key] = self._entries.pop(key)
        return True

    def get(self, key: K) -> V | None:
        if key not in self:
            return None
        return self._entries[key]

    def put(self, key: K, value: V) -> None:
        self._entries.pop(key, None)
        self._entries[key] = value
        if len(self._entries) > self._size:
            del self._entries[next(iter(self._entries))]
