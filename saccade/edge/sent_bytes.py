"""Stores bytes that clients have sent, so that later bodies can refer to them by digest.

Only the tenant that sent the bytes can refer to them. They are stored in memory, so a restart drops
them. Everything runs on one event loop, so there are no locks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from saccade.core.client import SHARE, Client

KEPT_SECONDS = 3600.0
"""How long bytes are stored after their last use."""
OVERHEAD = 512
"""Approximate memory of an entry in addition to its content, in bytes."""


@dataclass(slots=True)
class _Kept:
    data: bytes
    used: float  # when the bytes were last sent or referred to

    @property
    def nbytes(self) -> int:
        return len(self.data) + OVERHEAD


@dataclass(slots=True)
class _Owner:
    """The stored bytes of one API key, by (tenant, digest), the least recently used first."""

    kept: OrderedDict[tuple[str, str], _Kept] = field(default_factory=OrderedDict)
    nbytes: int = 0

    def drop_oldest(self) -> None:
        _, oldest = self.kept.popitem(last=False)
        self.nbytes -= oldest.nbytes

    def drop_before(self, then: float) -> None:
        while self.kept and next(iter(self.kept.values())).used < then:
            self.drop_oldest()


class SentBytes:
    """Stores at most `limit` bytes for all clients. If there are several API keys, each key can use
    only its share.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._owners: dict[str, _Owner] = {}

    @property
    def nbytes(self) -> int:
        return sum(owner.nbytes for owner in self._owners.values())

    def get(self, client: Client, salt: str, name: str) -> bytes | None:
        """Return the bytes with the digest `name` that the client's tenant has sent, or None."""
        return self.find(client.name, client.tenant(salt), name)

    def find(self, owner_name: str, tenant: str, name: str) -> bytes | None:
        """Return the bytes with the digest `name` that a tenant of the API key `owner_name` has
        sent, or None.
        """
        owner = self._owners.get(owner_name)
        key = tenant, name
        if owner is None or (found := owner.kept.get(key)) is None:
            return None
        now = self._clock()
        if found.used < now - KEPT_SECONDS:
            return None
        found.used = now
        owner.kept.move_to_end(key)
        return found.data

    def put(self, client: Client, salt: str, name: str, data: bytes) -> None:
        """Store `data` under the digest `name`. If space is needed, bytes of the API key with the
        most bytes are evicted.
        """
        self._expire()
        most = int(self._limit * SHARE) if client.limited else self._limit
        kept = _Kept(data, self._clock())
        if kept.nbytes > most:
            return
        owner = self._owners.setdefault(client.name, _Owner())
        key = client.tenant(salt), name
        if (before := owner.kept.pop(key, None)) is not None:
            owner.nbytes -= before.nbytes
        owner.kept[key] = kept
        owner.nbytes += kept.nbytes
        while owner.nbytes > most:
            owner.drop_oldest()
        while self.nbytes > self._limit:
            max(self._owners.values(), key=lambda each: each.nbytes).drop_oldest()

    def _expire(self) -> None:
        for name, owner in [*self._owners.items()]:
            owner.drop_before(self._clock() - KEPT_SECONDS)
            if not owner.kept:
                del self._owners[name]
