"""Accepts connections on a listening socket, a few in each iteration of the event loop.

uvloop's own server would accept all pending connections in one iteration, which would delay every
client. Accepting pauses while no file descriptor is free.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

log = logging.getLogger("saccade")

ACCEPTS_PER_TURN = 8
"""Maximum number of connections accepted in each iteration of the event loop. Each takes about 40
microseconds.
"""
TURNS_TO_READ = 2
"""Iterations of the event loop until data that a new connection has already sent is read."""
BACKLOG = 2048
"""Maximum number of connections that the kernel queues until they are accepted."""
PAUSE_SECONDS = 0.5
"""How long accepting pauses if no file descriptor is free."""


class Listener:
    """Accepts connections on the socket `bound`, which it does not close. `factory` creates their
    protocols.
    """

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
        """Stop accepting connections. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._bound)
            if self._pause is not None:
                self._pause.cancel()

    async def wait_closed(self) -> None:
        """Wait until all accepted connections are passed to their protocols."""
        await asyncio.gather(*self._opening)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        """Accept a few connections, then pause until the data that they have sent is read.

        By then, a connection with a request is marked as busy, so it is not closed to accept
        another one.
        """
        few: list[socket.socket] = []
        while len(few) < ACCEPTS_PER_TURN:
            try:
                few.append(self._bound.accept()[0])
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                log.error("new connections cannot be accepted: %s", error)
                self._loop.remove_reader(self._bound)
                self._pause = self._loop.call_later(PAUSE_SECONDS, self._resume)
                break
        if few:
            self._loop.remove_reader(self._bound)
            task = self._loop.create_task(self._connect_all(few))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _connect_all(self, few: Sequence[socket.socket]) -> None:
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
