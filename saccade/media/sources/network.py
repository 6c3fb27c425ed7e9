"""Connections that can be given up: a wait for a server ends with a network error.

httpcore is never cancelled. Interrupted while it opens, closes or hands over a connection, it keeps
the connection in its pool for good, at times with an open socket. Network errors it handles. Knows
nothing of HTTP, or of addresses (`address.py` decides).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

import httpcore

GIVEN_UP: ContextVar[asyncio.Future[None] | None] = ContextVar("given up", default=None)
"""A task that asks a server sets this to a future, and is done soon after that is."""

T = TypeVar("T")


class Network(httpcore.AsyncNetworkBackend):
    """Opens connections that can be given up."""

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
        """Connect to a host. Raises httpcore.ConnectError when given up."""
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
            await self.aclose()  # httpcore has nothing to close yet
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


async def until_given_up(work: Coroutine[Any, Any, T], error: type[Exception]) -> T:
    """Return the result of `work`. Raises `error` if this task's future is done first."""
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
