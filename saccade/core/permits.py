"""The number of requests in flight, in all and per client. One event loop; no locks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from saccade.core.client import ANYBODY, SHARE, Client
from saccade.core.errors import Overloaded


class Permits:
    """Permits for requests in flight, `most` in all.

    `option`: the command line's name for the limit, for refusals. `told` hears how many permits are
    taken after each change. `idle` is set while all permits are free.
    """

    def __init__(
        self, most: int, option: str, told: Callable[[int], None] = lambda _: None
    ) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._most = most
        self._option = option
        self._told = told
        self._taken: Counter[str] = Counter()
        """By the name of the client's key."""

    def check(self, client: Client = ANYBODY) -> None:
        """Raise Overloaded if `client` would get a refusal now."""
        mine, taken = self._taken[client.name], self.taken
        if client.limited and mine >= max(1, self._most * SHARE):
            raise Overloaded(
                f"{mine} requests of this key are in flight, the most that one of several keys may "
                f"have (half of {self._option}); try again"
            )
        if taken >= self._most:
            raise Overloaded(
                f"{taken} requests are in flight, the most this server takes ({self._option}); "
                "try again"
            )

    @property
    def taken(self) -> int:
        """Return the number of requests in flight."""
        return self._taken.total()

    @contextmanager
    def acquire(self, client: Client = ANYBODY) -> Iterator[None]:
        """Hold a permit. Raises as `check` does."""
        self.check(client)
        self._count(client, 1)
        try:
            yield
        finally:
            self._count(client, -1)

    def _count(self, client: Client, change: int) -> None:
        self._taken[client.name] += change
        if not self._taken[client.name]:
            del self._taken[client.name]
        if self.taken:
            self.idle.clear()
        else:
            self.idle.set()
        self._told(self.taken)
