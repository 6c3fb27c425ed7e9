"""Opens connections to checked addresses. Callers can abandon a connection.

A host is checked after it is resolved, so private addresses are rejected in any spelling (decimal,
octal, hexadecimal, IPv4 in IPv6). The connection is made to the checked address.

httpcore is never cancelled: if it is interrupted while it opens, closes or hands over a connection,
the connection stays in its pool forever, sometimes with an open socket. But httpcore does clean up
after a network error. So if a caller abandons a connection, the pending network operation raises a
network error.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import httpcore

from saccade.core.errors import ImageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]

NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Azure's cloud metadata at a seemingly public address, and ranges that older Python versions treat
# as global.
REFUSED = tuple(map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "64:ff9b:1::/48")))


def is_public(address: Address) -> bool:
    """Return True for a public internet address. IPv4 addresses embedded in IPv6 are unwrapped
    first.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = (
            address.ipv4_mapped
            or address.sixtofour
            or (address.teredo[1] if address.teredo else None)
        )
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or any(address in network for network in REFUSED)
    )


LOOKUPS = ThreadPoolExecutor(128, "saccade-dns")
"""Separate threads for lookups, so that a name server that does not respond cannot block other
work. There are as many threads as fetches. They start on demand.
"""


async def resolve(host: str, port: int) -> list[str]:
    """Look up the addresses of a host through the system's resolver."""
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(LOOKUPS, ask)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class PinnedNetwork(httpcore.AsyncNetworkBackend):
    """Connects httpcore to checked addresses only.

    The Host header, SNI and certificate check still use the requested name.
    """

    def __init__(self, allow_private: bool, resolve: Resolve = resolve) -> None:
        self._allow_private = allow_private
        self._resolve = resolve
        self._network = Network()

    async def _find(self, host: str, port: int) -> list[str]:
        return await self._resolve(host, port)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve the host, check its addresses, and connect to the first one that answers.

        Raises ImageError unless all addresses are public.
        """
        try:
            found = until_given_up(self._find(host, port), httpcore.ConnectError)
            addresses = await found
        except (OSError, UnicodeError) as error:
            raise ImageError(
                f"the image's host {host!r} cannot be found", code="image_unreachable"
            ) from error
        if not self._allow_private and not all(
            is_public(ipaddress.ip_address(address.partition("%")[0])) for address in addresses
        ):
            raise ImageError(
                f"the image's host {host!r} has a private, local or reserved address; "
                "images are fetched from public ones only "
                "(--allow-private-media lifts this)",
                code="image_address_refused",
            )
        refused: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._network.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                refused = error
        raise refused


GIVEN_UP: ContextVar[asyncio.Future[None] | None] = ContextVar("given up", default=None)
"""A future that a task sets before it sends a request. Completing the future makes the task end
soon.
"""

T = TypeVar("T")


class Network(httpcore.AsyncNetworkBackend):
    """Opens connections that can be abandoned."""

    def __init__(self) -> None:
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to a host. Raises httpcore.ConnectError if the caller abandons the connection."""
        work = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(await until_given_up(work, httpcore.ConnectError))


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await until_given_up(self._inner.read(max_bytes, timeout), httpcore.ReadError)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await until_given_up(self._inner.write(buffer, timeout), httpcore.WriteError)

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        work = self._inner.start_tls(ssl_context, server_hostname, timeout)
        try:
            return _Stream(await until_given_up(work, httpcore.ConnectError))
        except BaseException:
            await self.aclose()  # httpcore does not have the connection yet
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


async def until_given_up(work: Coroutine[Any, Any, T], error: type[Exception]) -> T:
    """Return the result of `work`. Raises `error` if this task's `GIVEN_UP` future
    completes first.
    """
    given_up = GIVEN_UP.get()
    if given_up is None:
        return await work
    working = asyncio.ensure_future(work)
    await asyncio.wait((working, given_up), return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        raise error("given up")
    return working.result()
