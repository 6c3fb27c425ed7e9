"""Bytes that clients have sent, kept so that a later body may name them instead.

Owns whose they are, their bounds and their expiry. A name is only found for the tenant that sent
the bytes. In memory: a restart drops all. One event loop; no locks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from saccade.core.client import SHARE, Client

KEPT_SECONDS = 3600.0
"""Seconds that bytes are kept after their last use."""
OVERHEAD = 512
"""Bytes that an entry takes beside its content, about."""


@dataclass(slots=True)
class _Kept:
    """One tenant's bytes under one name. used: when they were last sent or named."""

    data: bytes
    used: float

    @property
    def nbytes(self) -> int:
        return len(self.data) + OVERHEAD


@dataclass(slots=True)
class _Owner:
    """One key's bytes by tenant and name, the least recently used first."""

    kept: OrderedDict[tuple[str, str], _Kept] = field(default_factory=OrderedDict)
    nbytes: int = 0

    def drop_oldest(self) -> None:
        _, oldest = self.kept.popitem(last=False)
        self.nbytes -= oldest.nbytes

    def drop_before(self, then: float) -> None:
        while self.kept and next(iter(self.kept.values())).used < then:
            self.drop_oldest()


class SentBytes:
    """All kept bytes, `limit` at most. One of several keys has at most its share."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._owners: dict[str, _Owner] = {}

    @property
    def nbytes(self) -> int:
        return sum(owner.nbytes for owner in self._owners.values())

    def get(self, client: Client, salt: str, name: str) -> bytes | None:
        """Return what this tenant has sent under a name, or None."""
        return self.find(client.name, client.tenant(salt), name)

    def find(self, owner_name: str, tenant: str, name: str) -> bytes | None:
        """Return what a key's tenant has sent under a name, or None."""
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
        """Keep a tenant's bytes. Those of the key that keeps most make room for them."""
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
