"""A small web server on loopback for tests of fetching, and a fetcher that may ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from saccade.core.metrics import Metrics
from saccade.plugins.fetch.fetcher import Fetcher
from saccade.plugins.fetch.network import Resolve, resolve
from tests.helpers.options import serve_options

Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
PICTURE = bytes(range(256)) * 20


class Origin:
    """A small HTTP server on loopback that counts connections and requests."""

    def __init__(self, answer: Handler) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1].decode()
                self.requests.append(head.decode())
                await self.answer(path, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def origin(answer: Handler, host: str = "127.0.0.1") -> AsyncIterator[Origin]:
    made = Origin(answer)
    server = await asyncio.start_server(made.serve, host, 0)
    made.url = f"http://{host}:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


@asynccontextmanager
async def fetcher(
    resolve: Resolve = resolve, **options: object
) -> AsyncIterator[tuple[Fetcher, Metrics]]:
    metrics = Metrics()
    made = Fetcher(serve_options(**{"allow_private_media": True, **options}), metrics, resolve)
    try:
        yield made, metrics
    finally:
        await made.close()


async def ok(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PICTURE) + PICTURE)
