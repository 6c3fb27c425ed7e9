"""Connection limits: the maximum in total and per address, and how many messages are parsed in each
iteration of the event loop.

All connections are checked once a second. Everything runs on one event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import deque
from collections.abc import Callable
from typing import Protocol

from saccade.core.client import client_address
from saccade.core.errors import ConfigError
from saccade.core.metrics import Metrics
from saccade.core.options import ConnectionOptions

log = logging.getLogger("saccade")

MAX_CONNECTIONS = 4096
"""Default maximum. Each connection takes about 10 kB. Far fewer requests are handled
concurrently.
"""
MAX_RESERVE = 128
"""Maximum number of connections over the limit. They can only request health checks and other
public endpoints.
"""
MAX_FILES = 256
"""File descriptors that connections leave for files, fetches and processes."""
SURPLUS_BYTES = 32 << 20
"""Maximum size of pipelined requests that wait for an earlier response, in total over all
connections.
"""
MAX_CHUNKS_PER_TICK = 3
"""How many chunks are parsed in each iteration of the event loop, over all connections: headers,
chunked bodies, and pipelined requests. Each takes up to 0.3 ms.
"""


class Member(Protocol):
    """The methods of a connection that `ConnectionLimiter` calls."""

    @property
    def waits(self) -> bool:
        """True if data has arrived that was not read yet and may contain a request."""

    def check(self, now: float) -> None:
        """Close the connection if a timeout has expired. Called once a second."""

    def drop(self, reason: str) -> None:
        """Close the connection immediately. reason: a label of the metric that counts closed
        connections.
        """


def raise_descriptors() -> None:
    """Raise this process's soft limit on open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ConnectionLimiter:
    """Tracks and limits the connections of one server.

    Raises ConfigError if the limit on open files is too low for max_connections.
    """

    def __init__(self, options: ConnectionOptions, metrics: Metrics) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.reserve = min(MAX_RESERVE, descriptors // 8)
        available_fds = descriptors - self.reserve - min(MAX_FILES, descriptors // 4)
        if options.max_connections is not None and options.max_connections > available_fds:
            raise ConfigError(
                f"--tune max_connections={options.max_connections}: the limit of open files "
                f"({descriptors}, ulimit -Hn) allows at most {available_fds}"
            )
        self.limit = options.max_connections or min(MAX_CONNECTIONS, available_fds)
        self.limit_per_address = options.max_connections_per_address or max(1, self.limit // 2)
        self.surplus = 0
        self._metrics = metrics
        self._members: dict[Member, str] = {}  # every connection and its address
        self._number: dict[str, int] = {}  # connections per address, without those over the limit
        self._idle: dict[Member, None] = {}  # the longest idle first, without those over the limit
        self._over_limit: dict[Member, None] = {}  # beyond the limit, the oldest first
        self._crowded = 0
        self._soon: deque[Callable[[], None]] = deque()
        self._begun = 0  # chunks parsed in this iteration
        self._turn: asyncio.Handle | None = None  # callback that resumes parsing

    def join(self, member: Member, host: str) -> bool:
        """Add a connection from `host`. Return True if it is within the limits.

        If a limit is reached, the longest idle connection is closed first, if there is one. A
        connection over the limit can only request public endpoints. If there are too many of these,
        the oldest one is closed.
        """
        address = client_address(host)
        if self._number.get(address, 0) >= self.limit_per_address:
            self._close_idle(address)
        elif len(self._members) - len(self._over_limit) >= self.limit:
            self._close_idle(None)
        welcome = (
            self._number.get(address, 0) < self.limit_per_address
            and len(self._members) - len(self._over_limit) < self.limit
        )
        if welcome:
            self._number[address] = self._number.get(address, 0) + 1
            self._idle[member] = None
        else:
            if len(self._over_limit) >= self.reserve:
                self._close(next(iter(self._over_limit)))
            self._over_limit[member] = None
        self._members[member] = address
        self._count()
        return welcome

    def leave(self, member: Member) -> None:
        """Remove a closed connection. A no-op if it was already removed."""
        address = self._members.pop(member, None)
        if address is None:
            return
        self._idle.pop(member, None)
        if member in self._over_limit:
            del self._over_limit[member]
        else:
            self._number[address] -= 1
            if not self._number[address]:
                del self._number[address]
        self._count()

    def busy(self, member: Member) -> None:
        """Mark a connection as handling a request, so that it is not closed to accept another
        one.
        """
        self._idle.pop(member, None)

    def idle(self, member: Member) -> None:
        """Mark a connection as idle, so that it can be closed to accept another one."""
        if member in self._members and member not in self._over_limit:
            self._idle[member] = None

    def hold_surplus(self, nbytes: int) -> bool:
        """Add `nbytes` to the count of pipelined bytes. Returns False, without adding them, if the
        limit is exceeded.
        """
        if nbytes > 0 and self.surplus + nbytes > SURPLUS_BYTES:
            return False
        self.surplus += nbytes
        return True

    def at_once(self) -> bool:
        """Count a chunk and return True if it may be parsed in this iteration of the event loop.

        Returns False if the maximum is reached or other chunks are queued.
        """
        if self._soon or self._begun >= MAX_CHUNKS_PER_TICK:
            return False
        self._begun += 1
        self._resume()
        return True

    def soon(self, work: Callable[[], None]) -> None:
        """Queue a call of `work`, in FIFO order.

        Only a few queued calls, over all connections, run in each iteration of the event loop, so
        that other events are not delayed.
        """
        self._soon.append(work)
        self._resume()

    def _resume(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        """Run some of the queued calls. Calls that are queued meanwhile wait for the next
        iteration.

        If a call raises, the rest also waits for the next iteration.
        """
        self._turn = None
        self._begun = count = min(MAX_CHUNKS_PER_TICK, len(self._soon))
        if count:
            self._resume()
        for _ in range(count):
            self._soon.popleft()()

    def closed(self, reason: str) -> None:
        """Count a connection that the server closed early, by `reason`."""
        self._metrics.inc("saccade_connections_closed_total", reason=reason)

    def check(self, now: float) -> None:
        """Check the timeouts of all connections. Called once a second."""
        for member in list(self._members):
            member.check(now)
        if self._crowded:
            log.warning(
                "%d connections were closed because of the connection limit: %d, and %d per "
                "address (--tune max_connections, max_connections_per_address)",
                self._crowded,
                self.limit,
                self.limit_per_address,
            )
            self._crowded = 0

    def _close_idle(self, address: str | None) -> None:
        """Close the longest idle connection, or the longest idle one from `address` if that is not
        None.
        """
        for member in self._idle:
            if (address is None or self._members[member] == address) and not member.waits:
                self._close(member)
                return

    def _close(self, member: Member) -> None:
        self._crowded += 1
        self.leave(member)
        member.drop("crowd")

    def _count(self) -> None:
        self._metrics.set("saccade_connections", len(self._members))
