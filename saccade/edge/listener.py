"""The listening socket: accepts a few connections per turn of the event loop.

uvloop's own server accepts all waiting connections in one turn, and every client waits as long.
Owns the socket's readiness and the pause without free descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

log = logging.getLogger("saccade")

ACCEPTS_PER_TURN = 8
"""Each costs some forty microseconds."""
TURNS_TO_READ = 2
"""Of the event loop, until what a new connection has sent already was read."""
BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""
PAUSE_SECONDS = 0.5
"""Without a free descriptor, none is accepted for so long."""


class Listener:
    """Accepts on `bound`, which stays open. `factory` makes a connection's protocol."""

    def __init__(self, bound: socket.socket, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self._bound = bound
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._opening = set[asyncio.Task[None]]()
        self._pause: asyncio.TimerHandle | None = None
        self._open = True
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Stop accepting. Safe to call twice."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._bound)
            if self._pause is not None:
                self._pause.cancel()

    async def wait_closed(self) -> None:
        """Wait until accepted connections have their protocols."""
        await asyncio.gather(*self._opening)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        """Accept a few. The rest wait until the new ones' bytes were read.

        A connection with a request is busy by then, so latecomers leave it alone.
        """
        few: list[socket.socket] = []
        while len(few) < ACCEPTS_PER_TURN:
            try:
                few.append(self._bound.accept()[0])
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                log.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(self._bound)
                self._pause = self._loop.call_later(PAUSE_SECONDS, self._resume)
                break
        if few:
            self._loop.remove_reader(self._bound)
            task = self._loop.create_task(self._let_in(few))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _let_in(self, few: Sequence[socket.socket]) -> None:
        await asyncio.gather(*map(self._connect, few))
        for _ in range(TURNS_TO_READ):
            await asyncio.sleep(0)
        if self._open and self._pause is None:
            self._resume()

    async def _connect(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._factory, accepted)
        except OSError:  # the client has disconnected
            accepted.close()
