"""The sender of a request: one identity, derived once, that decides cache, files and share. Also
the number of requests in flight, in all and per client.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from blake3 import blake3

from saccade.core.errors import Overloaded

SHARE = 0.5
"""Where there are several keys: what one may have of the permits, of the bytes in flight, and of
the disk for uploaded files.
"""
SALT_BYTES = 16
"""Length of a salt within the server, whatever the client sent."""


@dataclass(frozen=True, slots=True)
class Client:
    """A request's sender.

    `name`: the key's name, "" for the key from --api-key, and without keys. `address`: the
    connection's source, "" for calls from Python. `limited`: True if this is one among several
    clients, each held to `SHARE` of the total.
    """

    name: str = ""
    address: str = ""
    shares_cache: bool = False
    limited: bool = False

    def salt(self, given: str) -> str:
        """Return the salt that separates this client's cache, "" without name and `cache_salt`.

        It is hexadecimal with a fixed length, derived from the client's name and the given
        `cache_salt`.
        """
        return _hashed("" if self.shares_cache else self.name, given)

    def tenant(self, given: str) -> str:
        """Name those whose images may meet in one process.

        Like `salt`, but different for each key even if keys share a cache.
        """
        return _hashed(self.name, given)

    def share(self, given: str) -> str:
        """Return the name under which the client's requests take turns.

        It is the key's name where there are several, else the salt's, else the address.
        """
        if self.limited and self.name:
            return f"key {self.name}"
        return f"salt {self.salt(given)}" if given else self.address


def _hashed(name: str, given: str) -> str:
    if not (name or given):
        return ""
    return blake3(json.dumps([name, given]).encode()).hexdigest(SALT_BYTES)


def client_address(host: str) -> str:
    """Return the address that a client counts under.

    For IPv6 this is its 64-bit network, as a client owns all addresses there. An IPv4 address
    mapped into IPv6 counts as the IPv4 address.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped or ipaddress.ip_network((address, 64), strict=False))
    return str(address)


ANYBODY = Client()
"""The group of all, where nobody is told from anybody else."""


class Permits:
    """Permits for requests in flight, `most` in all.

    `option`: the limit's name on the command line, for errors. `told` is called with the number of
    permits taken after each change. `idle` is set while all permits are free.
    """

    def __init__(
        self, most: int, option: str, on_change: Callable[[int], None] = lambda _: None
    ) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._most = most
        self._option = option
        self._on_change = on_change
        self._taken: Counter[str] = Counter()
        """By the name of the client's key."""

    def check(self, client: Client = ANYBODY) -> None:
        """Raise Overloaded if `client` would get an error now."""
        mine, taken = self._taken[client.name], self.taken
        if client.limited and mine >= max(1, self._most * SHARE):
            raise Overloaded(
                f"{mine} requests of this API key are in flight, the maximum for one of several "
                f"keys (half of {self._option}); try again"
            )
        if taken >= self._most:
            raise Overloaded(
                f"{taken} requests are in flight, the maximum of this server ({self._option}); "
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
        self._on_change(self.taken)
