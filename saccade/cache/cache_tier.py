"""One tier of a cache. It tracks the sizes of items, and evicts items to stay within a byte budget.

Eviction is GreedyDual-Size with frequency (Cao & Irani 1997; Cherkasova 1998). The priority of an
item is its worth per byte, plus the tier's floor when the item was last used. Evicting an item
raises the floor to that item's priority. So among items used at about the same time, items of low
worth are evicted first, and an unused item is evicted eventually, even if its worth is high. Among
items of equal worth, the least recently used one is evicted first.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Item:
    nbytes: int
    worth: float
    priority: float
    stamp: int
    holds: int = 0


class CacheTier(Generic[K]):
    """Tracks the sizes of items by key, and selects items to evict. It does not store their data.

    Held items are never evicted, even beyond the budget, and neither are those in `pinned`. The
    owner of `pinned` must call `unpinned` after it removes an item from it.
    """

    def __init__(self, budget_bytes: int, pinned: Container[K] = (), shared: bool = False) -> None:
        """Create an empty tier.

        pinned: keys of items that are not evicted.
        shared: True if other servers add and remove items in the same storage. Evicting an item
            then removes it from this object only.
        """
        self._pinned = pinned
        self.shared = shared
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.held_bytes = 0
        self.held: set[K] = set()
        self.evictions = 0
        self._floor = 0.0
        self._clock = 0
        self._items: dict[K, _Item] = {}
        # (priority, stamp, key). An entry is stale unless its stamp equals the item's.
        self._heap: list[tuple[float, int, K]] = []

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def put(self, key: K, nbytes: int, worth: float) -> None:
        """Add an item, even if it exceeds the budget.

        worth: the cost per byte of recomputing the item, times the number of its uses.
        """
        assert key not in self._items
        self._items[key] = _Item(nbytes, 0.0, 0.0, 0)
        self.used_bytes += nbytes
        self.use(key, worth)

    def remove(self, key: K) -> int:
        """Remove an item that is not held. Returns its size in bytes."""
        assert key not in self.held
        nbytes = self._items.pop(key).nbytes
        self.used_bytes -= nbytes
        return nbytes

    def use(self, key: K, worth: float) -> None:
        """Record a use of `key`, and update its worth."""
        self._items[key].worth = worth
        self._refresh(key)

    def hold(self, key: K) -> None:
        """Exclude an item from eviction until `release` has been called once for each `hold`."""
        item = self._items[key]
        item.holds += 1
        if item.holds == 1:
            self.held.add(key)
            self.held_bytes += item.nbytes

    def release(self, key: K) -> None:
        item = self._items[key]
        item.holds -= 1
        if item.holds == 0:
            self.held.remove(key)
            self.held_bytes -= item.nbytes
            self._refresh(key)

    def unpinned(self, key: K) -> None:
        """Make an item evictable after its last pin was removed. This counts as a use."""
        self._refresh(key)

    def make_room(self, nbytes: int, keep: Collection[K] = ()) -> list[K]:
        """Evict items until `nbytes` more fit, or only held and pinned items remain.

        Items in `keep` are evicted after all others. Returns the evicted keys.
        """
        evicted: list[K] = []
        kept: list[tuple[float, int, K]] = []
        while self._heap and self.used_bytes + nbytes > self.budget_bytes:
            entry = heappop(self._heap)
            if self._stale(entry):
                continue
            if entry[2] in keep:
                kept.append(entry)
                continue
            evicted.append(self._evict(entry))
        for entry in kept:
            if self.used_bytes + nbytes > self.budget_bytes:
                evicted.append(self._evict(entry))
            else:
                heappush(self._heap, entry)
        self.evictions += len(evicted)
        return evicted

    def shed(self, nbytes: int) -> list[K]:
        """Evict items of at least `nbytes` in total, or all that are not held or pinned.

        Returns the evicted keys.
        """
        return self.make_room(self.budget_bytes - self.used_bytes + nbytes) if nbytes > 0 else []

    def clear(self, keep: Collection[K]) -> list[K]:
        """Remove every item that is not in `keep`, which must include all held items.

        Returns the removed keys. These removals do not count as evictions.
        """
        gone = [key for key in self._items if key not in keep]
        for key in gone:
            self.remove(key)
        return gone

    def _evict(self, entry: tuple[float, int, K]) -> K:
        self._floor = max(self._floor, entry[0])
        self.remove(entry[2])
        return entry[2]

    def _stale(self, entry: tuple[float, int, K]) -> bool:
        item = self._items.get(entry[2])
        if item is None or item.stamp != entry[1] or item.holds > 0:
            return True
        return entry[2] in self._pinned

    def _refresh(self, key: K) -> None:
        self._clock += 1
        item = self._items[key]
        item.priority, item.stamp = self._floor + item.worth, self._clock
        if item.holds or key in self._pinned:
            return  # not evictable now; `release` or `unpinned` calls this function again
        heappush(self._heap, (item.priority, item.stamp, key))
        if len(self._heap) > 64 + 4 * len(self._items):
            self._heap = [entry for entry in self._heap if not self._stale(entry)]
            heapify(self._heap)
