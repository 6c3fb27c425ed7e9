"""Turns to fetch: places shared by requests, so that one request or one client never holds them
all.

Owns the queue and the counts of held places. Knows nothing of URLs or connections. One event loop;
no locks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from saccade.core.client import Client
from saccade.core.errors import Overloaded


class MemoryBudget(Protocol):
    """Counts the bytes that a request makes the server hold, and knows those held already."""

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` more before they arrive, or fewer if negative.

        Raises Overloaded if the budget is used up now, TooLarge if the bytes exceed the whole
        budget.
        """
        ...

    def sent(self, tenant: str, name: str) -> bytes | None:
        """Return bytes that the tenant sent before under their digest's name, if kept."""
        ...


class Boundless:
    """A budget without end."""

    def reserve(self, nbytes: int) -> None:
        pass

    def sent(self, tenant: str, name: str) -> bytes | None:  # noqa: ARG002 - nothing is kept
        return None


BOUNDLESS = Boundless()
_requests = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Requester:
    """One request. `client` is the sender, as far as fairness goes. `owner` has the readable files.
    `tenant` keeps its bytes apart from other tenants' in every process. `request` tells the
    client's requests apart.
    """

    client: str = ""
    owner: str = ""
    budget: MemoryBudget = BOUNDLESS
    tenant: str = ""
    request: str = field(default_factory=lambda: str(next(_requests)))

    @classmethod
    def of(cls, client: Client, salt: str = "", budget: MemoryBudget = BOUNDLESS) -> Requester:
        """Make the requester of one of a client's requests."""
        return cls(client.share(salt), client.name, budget, client.tenant(salt))


@dataclass(slots=True, eq=False)
class Ticket:
    """A wait for a place, on behalf of one or several askers. The place counts for the asker in
    `turn`.
    """

    turn: asyncio.Future[Requester] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class FairPermits:
    """Gives out `places` at a time. One client has at most `per_client`, one request `per_request`.

    A free place goes to the client with the fewest, and within it to the request with the fewest.
    Among equals, the first gets it.
    """

    def __init__(self, places: int, per_client: int, per_request: int) -> None:
        self._free = places
        self._per_client = per_client
        self._per_request = per_request
        self._queues: dict[str, dict[Requester, deque[Ticket]]] = {}  # by client; first come, first
        self._of_client: Counter[str] = Counter()
        self._of_request: Counter[Requester] = Counter()

    @property
    def waiting(self) -> int:
        """Count the tickets without a place. A ticket with several askers counts for each."""
        queues = (queue for asked in self._queues.values() for queue in asked.values())
        return sum(not ticket.turn.done() for queue in queues for ticket in queue)

    def enter(self, ticket: Ticket, asker: Requester) -> None:
        """Add `asker` to the wait for `ticket`."""
        if not ticket.turn.done():
            asked = self._queues.setdefault(asker.client, {})
            asked.setdefault(asker, deque()).append(ticket)
            self._give_out()

    async def wait(self, ticket: Ticket, patience: float) -> None:
        """Wait until the ticket has a place. Raises Overloaded after `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                await asyncio.shield(ticket.turn)
        except TimeoutError:
            raise Overloaded(
                f"{self.waiting} fetches wait for their turn, and this request's has not come for "
                f"{patience:g} s: try again, with fewer images by URL"
            ) from None

    def leave(self, ticket: Ticket) -> None:
        """Give the place back, or stop waiting."""
        if ticket.turn.cancel() or ticket.turn.cancelled():
            return
        asker = ticket.turn.result()
        self._free += 1
        self._count(asker, -1)
        self._give_out()

    def _give_out(self) -> None:
        while self._free and (found := self._next()) is not None:
            asker, ticket = found
            self._free -= 1
            self._count(asker, 1)
            ticket.turn.set_result(asker)

    def _next(self) -> tuple[Requester, Ticket] | None:
        """Take the asker of the next place out of the queue."""
        clients = [client for client in self._queues if self._of_client[client] < self._per_client]
        for client in sorted(clients, key=self._of_client.__getitem__):
            asked = self._queues[client]
            askers = [asker for asker in asked if self._of_request[asker] < self._per_request]
            for asker in sorted(askers, key=self._of_request.__getitem__):
                ticket = _first(asked[asker])
                if not asked[asker]:
                    del asked[asker]
                if ticket is not None:
                    return asker, ticket
            if not asked:
                del self._queues[client]
        return None

    def _count(self, asker: Requester, change: int) -> None:
        self._of_client[asker.client] += change
        self._of_request[asker] += change
        if not self._of_client[asker.client]:
            del self._of_client[asker.client]
        if not self._of_request[asker]:
            del self._of_request[asker]


def _first(queue: deque[Ticket]) -> Ticket | None:
    """Return the first ticket still waiting, and drop the dead tickets before."""
    while queue:
        ticket = queue.popleft()
        if not ticket.turn.done():
            return ticket
    return None
