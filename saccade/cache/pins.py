"""Pins protect cached items from eviction. This module records which items each client has pinned,
and until when.

A pin expires after its time. Each use by the client renews it. Each client is charged for its pins
in the cache's unit (pages or bytes). `PinTable` records pins and charges; the cache computes the
charges, and drops a pin when the table reports it as expired or over the limit. `PinnedItems` does
this for caches whose items have sizes and are in tiers. It also selects the pinned items to evict
if nothing else in a full tier can be evicted. A pin applies to an item in any tier.

All pins together cost at most `share`. A client's part is the share divided by the number of
clients with pins, plus the unused parts of other clients. A client that exceeds its part loses its
own oldest pins. If the total exceeds the share, the client with the highest charge loses pins. So
no client within its part loses pins because another one sets too many. Among a client's pins, the
least recently set or used one is dropped first.
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
"""Returns the time in seconds."""


@dataclass(slots=True)
class _Pin:
    seconds: int
    until: float
    stamp: int


class PinTable(Generic[K]):
    """Stores pins by client and item.

    The caller of `set` charges the client for the item, and the caller of `drop` refunds the
    charge.
    """

    def __init__(self, share: int = 0, clock: Clock = time.monotonic) -> None:
        self.share = share
        self.clock = clock
        self.charged: Counter[str] = Counter()
        self.given_way = 0  # pins that were dropped early to free space
        self._pins: dict[str, dict[K, _Pin]] = {}  # by client; its least recently used pin first
        # heap of (until, stamp, client, item). An entry is stale unless its stamp is the pin's.
        self._ends: list[tuple[float, int, str, K]] = []
        self._stamps = count(1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def has(self, client: str, item: K) -> bool:
        return item in self._pins.get(client, ())

    def budget_of(self, client: str) -> int:
        """Return the maximum total charge of a client.

        This is the client's part of the share, or what other clients leave unused if that is
        larger.
        """
        others = self.charged.total() - self.charged[client]
        clients = len(self._pins.keys() | {client})
        return max(self.share // clients, self.share - others)

    def set(self, client: str, item: K, seconds: int) -> bool:
        """Pin an item for `seconds` from now on. Return True if the client had no pin on it before.

        Pinning an item again never shortens its pin.
        """
        pins = self._pins.setdefault(client, {})
        before = pins.get(item)
        until = self.clock() + seconds
        pins[item] = _Pin(seconds, max(until, before.until if before else until), 0)
        self._length += before is None
        self._touch(client, item)
        return before is None

    def hit(self, client: str, item: K) -> None:
        """Renew the client's pin on an item, if there is one, after a use of the item."""
        pin = self._pins.get(client, {}).get(item)
        if pin is not None:
            pin.until = max(pin.until, self.clock() + pin.seconds)
            self._touch(client, item)

    def drop(self, client: str, item: K) -> None:
        """Remove a client's pin on an item. The pin must exist."""
        pins = self._pins[client]
        del pins[item]
        self._length -= 1
        if not pins:
            del self._pins[client]

    def charge(self, client: str, cost: int) -> None:
        """Add `cost`, which may be negative, to a client's charge."""
        self.charged[client] += cost
        if not self.charged[client]:
            del self.charged[client]

    def due(self) -> Iterator[tuple[str, K]]:
        """Yield the expired pins. Drop each one before you advance the iterator."""
        while self._ends and self._ends[0][0] <= self.clock():
            _, stamp, client, item = heappop(self._ends)
            pin = self._pins.get(client, {}).get(item)
            if pin is not None and pin.stamp == stamp:
                yield client, item

    def beyond(self) -> Iterator[tuple[str, K]]:
        """Yield pins to drop until the total charge is within the share.

        Drop each one before you advance the iterator.
        """
        while self.charged.total() > self.share:
            client = max(self._pins, key=lambda name: (self.charged[name], -self._oldest(name)))
            self.given_way += 1
            yield client, next(iter(self._pins[client]))

    def in_order(self) -> Iterator[tuple[str, K]]:
        """Yield all pins, in the order in which they should be dropped.

        Clients with the highest charge come first. Within a client, the least recently used pin
        comes first.
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
    """Manages the pins of a cache that has tiers, and evicts pinned items if nothing else is
    left.
    """

    def __init__(self, book: PinTable[K]) -> None:
        """Start without pins or tiers.

        book: an empty table whose share is in bytes.
        """
        self.book = book
        self.nbytes = 0  # total size of the pinned items
        self.items: dict[K, _Pinned] = {}
        self._tiers: list[CacheTier[K]] = []

    def __len__(self) -> int:
        return len(self.items)

    def tier(self, budget_bytes: int, *, shared: bool = False) -> CacheTier[K]:
        """Create a tier that does not evict pinned items by itself."""
        tier: CacheTier[K] = CacheTier(budget_bytes, self.items, shared)
        self._tiers.append(tier)
        return tier

    def pin(self, items: Sequence[tuple[K, int]], client: str, seconds: int) -> None:
        """Pin items for a client for `seconds`, in the given order.

        Stops at the first item that exceeds what the client may pin. When pins are dropped, the
        first items are dropped last.

        items: (key, size in bytes) of each item.
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
        """Renew a client's pins on these items, after a use."""
        self.end_due()
        for key in reversed(keys):
            self.book.hit(client, key)

    def end_due(self) -> None:
        """Remove expired pins."""
        for client, key in self.book.due():
            self._end(client, key)

    def forget(self, key: K) -> None:
        """Remove all pins on an item."""
        item = self.items.get(key)
        for client in tuple(item.clients) if item else ():
            self._end(client, key)

    def clear(self) -> None:
        """Remove all pins."""
        for client, key in self.book.in_order():
            self._end(client, key)

    def make_room(self, tier: CacheTier[K], nbytes: int, keep: Collection[K] = ()) -> list[K]:
        """Call `CacheTier.make_room`, then drop pins and evict their items until `nbytes` more fit.

        Held items are not evicted. Returns the evicted keys.
        """
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
