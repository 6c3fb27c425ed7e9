"""Which picture embeddings are resident, what they weigh, and which must stay.

Owns the bookkeeping; the tensors live with the workers, who do what the plans say. Knows nothing of tokens or sequences.
One tier today, the device's memory, evicted least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from saccade.cache.seen import Seen
from saccade.core.types import ImageKey, Missed

Tier = Literal["device"]


class EmbeddingCache:
    """Embeddings by key within `budget_bytes`. What is pinned is never evicted, even if that means going over the budget."""

    def __init__(self, budget_bytes: int, bytes_per_token: int) -> None:
        self.budget_bytes = budget_bytes
        self.bytes_per_token = bytes_per_token
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.evictions = 0
        self._seen = Seen()
        self._bytes: dict[ImageKey, int] = {}
        self._pins: dict[ImageKey, int] = {}
        self._idle: OrderedDict[ImageKey, None] = OrderedDict()  # not pinned, least recently used first

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def pinned(self) -> frozenset[ImageKey]:
        return frozenset(self._pins)

    def locate(self, key: ImageKey) -> Tier | None:
        """Where the embedding is; None if it would have to be computed."""
        return "device" if key in self._bytes else None

    def why_missing(self, key: ImageKey) -> Missed:
        """Why `key` is not resident."""
        return self._seen.why_missing(key)

    def touch(self, key: ImageKey) -> None:
        """`key` is about to be used: if it is resident, evict others first."""
        if key in self._idle:
            self._idle.move_to_end(key)

    def pin(self, key: ImageKey) -> None:
        """Keep a resident embedding until as many `unpin`s."""
        if key not in self._pins:
            self._pins[key] = 0
            del self._idle[key]
            self.pinned_bytes += self._bytes[key]
        self._pins[key] += 1

    def unpin(self, key: ImageKey) -> None:
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]
            self._idle[key] = None
            self.pinned_bytes -= self._bytes[key]

    def fits(self, nbytes: int) -> bool:
        """Whether `admit` would keep the budget. Where nothing is pinned, anything fits: a picture may be larger than the budget."""
        return not self._pins or self.pinned_bytes + nbytes <= self.budget_bytes

    def admit(self, key: ImageKey, nbytes: int, cost: float) -> tuple[ImageKey, ...]:  # noqa: ARG002 - `cost` decides once there are tiers
        """Make `key` resident, to be computed at `cost` (patches). Returns what was evicted for it."""
        assert key not in self._bytes
        evicted: list[ImageKey] = []
        while self._idle and self.used_bytes + nbytes > self.budget_bytes:
            victim, _ = self._idle.popitem(last=False)
            self.used_bytes -= self._bytes.pop(victim)
            evicted.append(victim)
        self._seen.add(key)
        self._bytes[key] = nbytes
        self._idle[key] = None
        self.used_bytes += nbytes
        self.evictions += len(evicted)
        return tuple(evicted)
