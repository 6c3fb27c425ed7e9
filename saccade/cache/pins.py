"""The pins of one cache: by client, by item, and for how long.

Owns pins by client and item, their times, and each client's cost in the cache's own unit (pages,
bytes). The cache charges for items, and releases them when the book says so. For a cache whose
items have sizes and lie in tiers, `PinnedItems` charges, and decides which pinned item leaves a
full tier: a pin holds wherever the item is, and whenever it comes.

All pins together cost at most `share`. A client's part is the share divided by the number of
clients with pins, plus unused parts. A client beyond its part loses its own oldest pins. An excess
over the share is taken from the client with the most. So a flood of pins from one client spares
every client within its part. Among a client's pins, the least recently set or hit is evicted first.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from typing import Generic, TypeVar

from saccade.cache.cache_tier import CacheTier

K = TypeVar("K", bound=Hashable)
Clock = Callable[[], float]
"""Seconds."""


@dataclass(slots=True)
class _Pin:
    seconds: int
    until: float
    stamp: int


class PinTable(Generic[K]):
    """Pins on items. The caller of `set` charges for the item, and the caller of `drop` refunds the
    charge.

    given_way: pins that ended early to make room.
    """

    def __init__(self, share: int = 0, clock: Clock = time.monotonic) -> None:
        self.share = share
        self.clock = clock
        self.charged: Counter[str] = Counter()
        self.given_way = 0
        self._pins: dict[str, dict[K, _Pin]] = {}  # of a client: the least recently used first
        self._ends: list[
            tuple[float, int, str, K]
        ] = []  # heap of (until, stamp, client, item); stale where the stamp has moved on
        self._stamps = count(1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def has(self, client: str, item: K) -> bool:
        return item in self._pins.get(client, ())

    def budget_of(self, client: str) -> int:
        """Return the most that all of a client's pins may cost.

        This is its part of the share, or what other clients leave if that is more.
        """
        others = self.charged.total() - self.charged[client]
        clients = len(self._pins.keys() | {client})
        return max(self.share // clients, self.share - others)

    def set(self, client: str, item: K, seconds: int) -> bool:
        """Pin an item from now on. Returns True if the pin is new. A pin's end only ever moves
        later.
        """
        pins = self._pins.setdefault(client, {})
        before = pins.get(item)
        until = self.clock() + seconds
        pins[item] = _Pin(seconds, max(until, before.until if before else until), 0)
        self._length += before is None
        self._touch(client, item)
        return before is None

    def hit(self, client: str, item: K) -> None:
        """Renew a client's pin after a hit, if it has one."""
        pin = self._pins.get(client, {}).get(item)
        if pin is not None:
            pin.until = max(pin.until, self.clock() + pin.seconds)
            self._touch(client, item)

    def drop(self, client: str, item: K) -> None:
        """Remove a pin that has ended."""
        pins = self._pins[client]
        del pins[item]
        self._length -= 1
        if not pins:
            del self._pins[client]

    def charge(self, client: str, cost: int) -> None:
        """Add `cost`, which may be negative, to what a client's pins cost."""
        self.charged[client] += cost
        if not self.charged[client]:
            del self.charged[client]

    def due(self) -> Iterator[tuple[str, K]]:
        """Yield pins whose time is over. Drop each before asking for the next."""
        while self._ends and self._ends[0][0] <= self.clock():
            _, stamp, client, item = heappop(self._ends)
            pin = self._pins.get(client, {}).get(item)
            if pin is not None and pin.stamp == stamp:
                yield client, item

    def beyond(self) -> Iterator[tuple[str, K]]:
        """Yield pins that must give way to keep within the share. Drop each before asking for the
        next.
        """
        while self.charged.total() > self.share:
            client = max(self._pins, key=lambda name: (self.charged[name], -self._oldest(name)))
            self.given_way += 1
            yield client, next(iter(self._pins[client]))

    def in_order(self) -> Iterator[tuple[str, K]]:
        """Yield all pins in the order in which they give way.

        Clients with the highest cost are first. Within a client, the least recently used pin is
        first.
        """
        for client in sorted(self._pins, key=lambda name: -self.charged[name]):
            yield from ((client, item) for item in tuple(self._pins.get(client, ())))

    def _oldest(self, client: str) -> int:
        return next(iter(self._pins[client].values())).stamp

    def _touch(self, client: str, item: K) -> None:
        pins = self._pins[client]
        pin = pins.pop(item)
        pin.stamp = next(self._stamps)
        pins[item] = pin
        heappush(self._ends, (pin.until, pin.stamp, client, item))
        if len(self._ends) > 2 * self._length + 64:
            self._ends = [
                (pin.until, pin.stamp, name, each)
                for name, own in self._pins.items()
                for each, pin in own.items()
            ]
            heapify(self._ends)


@dataclass(slots=True)
class _Pinned:
    nbytes: int
    clients: set[str] = field(default_factory=set)


class PinnedItems(Generic[K]):
    """The pinned items of a cache."""

    def __init__(self, book: PinTable[K]) -> None:
        """Start without pins or tiers.

        `book`: an empty one, whose share is in bytes.
        """
        self.book = book
        self.nbytes = 0  # of these, each counted once
        self.items: dict[K, _Pinned] = {}  # by key, empty until the first pin
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
