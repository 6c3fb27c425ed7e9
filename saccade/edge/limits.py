"""The connected clients: their number, their addresses, and the connection to end when there are
too many.

Owns the number of connections and the turns of reading, and checks all connections once a second.
Knows nothing of their content. One event loop; no locks.
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

MOST_CONNECTIONS = 4096
"""Each takes some ten kilobytes; the requests that are answered side by side are far fewer."""
LARGEST_RESERVE = 128
"""Connections beyond the limit, for those who look after the server: they may ask for its health.
"""
LARGEST_FILES = 256
"""Descriptors left to files, fetches and processes."""
SURPLUS_BYTES = 32 << 20
"""Bytes of requests that wait, unread, for the answer before them; of all connections together."""
PIECES_PER_TURN = 3
"""Pieces of heads and chunked bodies, or requests sent ahead, that are begun in a turn of the event
loop: each costs up to a third of a millisecond.
"""


class Member(Protocol):
    """What the limiter asks a connection."""

    @property
    def waits(self) -> bool:
        """Return True if an unread request may have arrived."""

    def check(self, now: float) -> None:
        """End an overdue connection. Called once a second."""

    def drop(self, reason: str) -> None:
        """End the connection at once."""


def raise_descriptors() -> None:
    """Raise the process's open file limit to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ConnectionLimiter:
    """One server's connections.

    Raises ConfigError if the open file limit is too low for max_connections.
    """

    def __init__(self, options: ConnectionOptions, metrics: Metrics) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.reserve = min(LARGEST_RESERVE, descriptors // 8)
        room = descriptors - self.reserve - min(LARGEST_FILES, descriptors // 4)
        if options.max_connections is not None and options.max_connections > room:
            raise ConfigError(
                f"--tune max_connections={options.max_connections}: the limit of open files "
                f"({descriptors}, ulimit -Hn) leaves room for {room}"
            )
        self.limit = options.max_connections or min(MOST_CONNECTIONS, room)
        self.limit_per_address = options.max_connections_per_address or max(1, self.limit // 2)
        self.surplus = 0
        self._metrics = metrics
        self._members: dict[Member, str] = {}  # every connection and its address
        self._number: dict[str, int] = {}  # of the members of an address, guests left out
        self._idle: dict[Member, None] = {}  # the longest idle first; guests are never in it
        self._guests: dict[Member, None] = {}  # beyond the limit, the oldest first
        self._crowded = 0
        self._soon: deque[Callable[[], None]] = deque()
        self._begun = 0  # pieces of this turn
        self._turn: asyncio.Handle | None = None  # in which it goes on

    def join(self, member: Member, host: str) -> bool:
        """Return True if a connection from `host` fits.

        Otherwise the connection is a guest, which may ask for open paths only, and makes way for
        the next guest.
        """
        address = client_address(host)
        if self._number.get(address, 0) >= self.limit_per_address:
            self._make_room(address)
        elif len(self._members) - len(self._guests) >= self.limit:
            self._make_room(None)
        welcome = (
            self._number.get(address, 0) < self.limit_per_address
            and len(self._members) - len(self._guests) < self.limit
        )
        if welcome:
            self._number[address] = self._number.get(address, 0) + 1
            self._idle[member] = None
        else:
            if len(self._guests) >= self.reserve:
                self._end(next(iter(self._guests)))
            self._guests[member] = None
        self._members[member] = address
        self._count()
        return welcome

    def leave(self, member: Member) -> None:
        """Count a connection as ended; safe to call twice."""
        address = self._members.pop(member, None)
        if address is None:
            return
        self._idle.pop(member, None)
        if member in self._guests:
            del self._guests[member]
        else:
            self._number[address] -= 1
            if not self._number[address]:
                del self._number[address]
        self._count()

    def busy(self, member: Member) -> None:
        """Mark a connection as answering a request, so that it is safe from newcomers."""
        self._idle.pop(member, None)

    def idle(self, member: Member) -> None:
        """Mark a connection's answer as ended, so that a newcomer may replace it."""
        if member in self._members and member not in self._guests:
            self._idle[member] = None

    def hold_surplus(self, nbytes: int) -> bool:
        """Count bytes that wait behind an unfinished answer. Returns False beyond the budget."""
        if nbytes > 0 and self.surplus + nbytes > SURPLUS_BYTES:
            return False
        self.surplus += nbytes
        return True

    def at_once(self) -> bool:
        """Return True if a piece of work may be done in this turn, and count it.

        Returns False if other work waits.
        """
        if self._soon or self._begun >= PIECES_PER_TURN:
            return False
        self._begun += 1
        self._go_on()
        return True

    def soon(self, work: Callable[[], None]) -> None:
        """Do a piece of work in order of asking.

        Each turn of the event loop does a few pieces over all connections, so that new events wait
        for few.
        """
        self._soon.append(work)
        self._go_on()

    def _go_on(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        """Do some waiting work.

        Work added meanwhile waits for the next turn, as does the rest after a failure.
        """
        self._turn = None
        self._begun = count = min(PIECES_PER_TURN, len(self._soon))
        if count:
            self._go_on()
        for _ in range(count):
            self._soon.popleft()()

    def closed(self, reason: str) -> None:
        """Count a connection that the server ended early."""
        self._metrics.inc("saccade_connections_closed_total", reason=reason)

    def check(self, now: float) -> None:
        """Check each connection. Called once a second."""
        for member in list(self._members):
            member.check(now)
        if self._crowded:
            log.warning(
                "%d connections were closed to make room for others; at most %d are kept, %d of "
                "one address (--tune max_connections, max_connections_per_address)",
                self._crowded,
                self.limit,
                self.limit_per_address,
            )
            self._crowded = 0

    def _make_room(self, address: str | None) -> None:
        """End the longest idle connection, from `address` if that is given."""
        for member in self._idle:
            if (address is None or self._members[member] == address) and not member.waits:
                self._end(member)
                return

    def _end(self, member: Member) -> None:
        self._crowded += 1
        self.leave(member)
        member.drop("crowd")

    def _count(self) -> None:
        self._metrics.set("saccade_connections", len(self._members))
