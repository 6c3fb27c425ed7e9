"""The pinned items of a cache whose items have sizes and lie in tiers: until when, and for whom.

Owns the pins and their charges in bytes. Makes the cache's tiers, which ask it what they may evict,
and decides which pinned item leaves a full tier. Knows neither what an item is nor where it lies: a
pin holds wherever the item is, and whenever it comes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, TypeVar

from saccade.cache.cache_tier import CacheTier
from saccade.cache.pins import PinBook

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Pinned:
    nbytes: int
    clients: set[str] = field(default_factory=set)


class PinnedItems(Generic[K]):
    """The pinned items of a cache. items: by key, none as long as nobody pins. nbytes: of these,
    each counted once.
    """

    def __init__(self, book: PinBook[K]) -> None:
        """Start without pins or tiers.

        `book`: an empty one, whose share is in bytes.
        """
        self.book = book
        self.nbytes = 0
        self.items: dict[K, _Pinned] = {}
        self._tiers: list[CacheTier[K]] = []

    def __len__(self) -> int:
        return len(self.items)

    def tier(self, budget_bytes: int, *, shared: bool = False) -> CacheTier[K]:
        """Create a tier that keeps what is pinned."""
        tier: CacheTier[K] = CacheTier(budget_bytes, self.items, shared)
        self._tiers.append(tier)
        return tier

    def pin(self, items: Sequence[tuple[K, int]], client: str, seconds: int) -> None:
        """Pin (key, bytes) items for a client for `seconds`, the first ones first.

        Stops where the client's part of the share is full. The first items give way last.
        """
        self.end_due()
        sums = list(accumulate(nbytes for _, nbytes in items))
        for key, nbytes in reversed(items[: bisect_right(sums, self.book.budget_of(client))]):
            if self.book.set(client, key, seconds):
                item = self.items.get(key)
                if item is None:
                    item = self.items[key] = _Pinned(nbytes)
                    self.nbytes += nbytes
                item.clients.add(client)
                self.book.charge(client, item.nbytes)
        for other, beyond in self.book.beyond():
            self._end(other, beyond)

    def hit(self, keys: Sequence[K], client: str) -> None:
        """Renew a client's pins on any of these, as it names them again."""
        self.end_due()
        for key in reversed(keys):
            self.book.hit(client, key)

    def end_due(self) -> None:
        """Drop the pins whose time is over."""
        for client, key in self.book.due():
            self._end(client, key)

    def forget(self, key: K) -> None:
        """Drop all pins on an item."""
        item = self.items.get(key)
        for client in tuple(item.clients) if item else ():
            self._end(client, key)

    def clear(self) -> None:
        """Drop all pins."""
        for client, key in self.book.in_order():
            self._end(client, key)

    def make_room(self, tier: CacheTier[K], nbytes: int, keep: Collection[K] = ()) -> list[K]:
        """Make room as `CacheTier.make_room` does. Evicts pinned items if that is too little."""
        self.end_due()
        evicted = tier.make_room(nbytes, keep)
        while tier.used_bytes + nbytes > tier.budget_bytes:
            idle = (
                (client, key)
                for client, key in self.book.in_order()
                if key in tier and key not in tier.held
            )
            if (pin := next(idle, None)) is None:
                break
            self._end(*pin)
            self.book.given_way += 1
            evicted += tier.make_room(nbytes, keep)
        return evicted

    def _end(self, client: str, key: K) -> None:
        item = self.items[key]
        self.book.drop(client, key)
        self.book.charge(client, -item.nbytes)
        item.clients.remove(client)
        if not item.clients:
            del self.items[key]
            self.nbytes -= item.nbytes
            for tier in self._tiers:
                if key in tier:
                    tier.unpinned(key)
