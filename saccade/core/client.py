"""The client that sent a request. It determines which cache entries, files and scheduling queue the
request may use. This module also limits the requests in flight, in total and per client.
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
"""The fraction that one of several API keys can use of the requests in flight, the bytes in flight,
and the disk space for uploaded files.
"""
SALT_BYTES = 16
"""Length in bytes of the salts that the server derives from the client's name and `cache_salt`."""


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request, identified by its API key or its address."""

    name: str = ""  # the API key's name; "" for the key from --api-key, or without keys
    address: str = ""  # the connection's source address; "" for calls from Python
    shares_cache: bool = False
    limited: bool = False  # one of several clients, each limited to `SHARE` of the total

    def salt(self, given: str) -> str:
        """Return the salt that separates this client's cache entries from those of other clients.

        It is a hexadecimal hash of the client's name and `given`, the request's `cache_salt`. It is
        "" if both are empty.
        """
        return _hashed("" if self.shares_cache else self.name, given)

    def tenant(self, given: str) -> str:
        """Return an identifier for the clients whose images one process may decode.

        It is computed like `salt`, but API keys always get different ones, even if they share a
        cache.
        """
        return _hashed(self.name, given)

    def share(self, given: str) -> str:
        """Return the name of the fair scheduling queue for this client's requests.

        It is the API key's name if the server has several keys. Otherwise it is derived from
        `given`, the request's `cache_salt`, or is the client's address if there is no salt.
        """
        if self.limited and self.name:
            return f"key {self.name}"
        return f"salt {self.salt(given)}" if given else self.address


def _hashed(name: str, given: str) -> str:
    if not (name or given):
        return ""
    return blake3(json.dumps([name, given]).encode()).hexdigest(SALT_BYTES)


def client_address(host: str) -> str:
    """Return the address under which connections from `host` are counted.

    For IPv6 this is the /64 network, because one client usually has all of its addresses. An
    IPv4-mapped IPv6 address is counted as the IPv4 address.
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
"""The client of every request on a server that does not distinguish clients."""


class Permits:
    """Limits the requests in flight to `most`.

    option: the command-line option that sets the limit, for error messages.
    on_change: called with the number of requests in flight after each change.

    The event `idle` is set while no request is in flight.
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
        """The number of requests in flight, by the name of the client's API key."""

    def check(self, client: Client = ANYBODY) -> None:
        """Raise Overloaded if another request of `client` would exceed a limit now."""
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
        """The number of requests in flight."""
        return self._taken.total()

    @contextmanager
    def acquire(self, client: Client = ANYBODY) -> Iterator[None]:
        """Count a request as in flight within the context. Raises Overloaded if a limit is
        reached.
        """
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
