"""Turns to fetch and turns of image workers, between clients and between one client's requests, so
that one request or one client never holds all.

Owns the queue and the counts of held places. One event loop; no locks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

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

    async def settle(self, tenant: str) -> None:
        """Take note whose request this is."""
        ...

    def sent(self, tenant: str, name: str) -> bytes | None:
        """Return bytes that the tenant sent before under their digest's name, if kept."""
        ...


class Boundless:
    """A budget without end."""

    def reserve(self, nbytes: int) -> None:
        pass

    async def settle(self, tenant: str) -> None:
        pass

    def sent(self, tenant: str, name: str) -> bytes | None:  # noqa: ARG002 - nothing is kept
        return None


BOUNDLESS = Boundless()
_requests = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Requester:
    """One request. `client` is the sender that fairness counts. `owner` has the readable files.
    `tenant` separates its bytes from other tenants' in every process. `request` distinguishes the
    client's requests.
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
    """A wait for a place, on behalf of one or several askers. The place counts for the requester in
    `turn`.
    """

    turn: asyncio.Future[Requester] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class FairPermits:
    """Gives out `places` at a time. One client has at most `per_client`, one request `per_request`.

    A free slot is given to the client with the fewest, and within it to the request with the
    fewest. Among equals, the first gets it.
    """

    def __init__(self, places: int, per_client: int, per_request: int) -> None:
        self._free = places
        self._per_client = per_client
        self._per_request = per_request
        self._queues: dict[str, dict[Requester, deque[Ticket]]] = {}  # by client; FIFO
        self._of_client: Counter[str] = Counter()
        self._of_request: Counter[Requester] = Counter()

    @property
    def waiting(self) -> int:
        """Count the tickets without a place. A ticket with several askers counts for each."""
        queues = (queue for asked in self._queues.values() for queue in asked.values())
        return sum(not ticket.turn.done() for queue in queues for ticket in queue)

    def enter(self, ticket: Ticket, requester: Requester) -> None:
        """Add `requester` to the wait for `ticket`."""
        if not ticket.turn.done():
            asked = self._queues.setdefault(requester.client, {})
            asked.setdefault(requester, deque()).append(ticket)
            self._give_out()

    async def wait(self, ticket: Ticket, patience: float) -> None:
        """Wait until the ticket has a place. Raises Overloaded after `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                await asyncio.shield(ticket.turn)
        except TimeoutError:
            raise Overloaded(
                f"{self.waiting} fetches are queued, and this request has waited for {patience:g} "
                "s: try again, with fewer images by URL"
            ) from None

    def leave(self, ticket: Ticket) -> None:
        """Give the place back, or stop waiting."""
        if ticket.turn.cancel() or ticket.turn.cancelled():
            return
        requester = ticket.turn.result()
        self._free += 1
        self._count(requester, -1)
        self._give_out()

    def _give_out(self) -> None:
        while self._free and (found := self._next()) is not None:
            requester, ticket = found
            self._free -= 1
            self._count(requester, 1)
            ticket.turn.set_result(requester)

    def _next(self) -> tuple[Requester, Ticket] | None:
        """Take the requester of the next place out of the queue."""
        clients = [client for client in self._queues if self._of_client[client] < self._per_client]
        for client in sorted(clients, key=self._of_client.__getitem__):
            asked = self._queues[client]
            askers = [
                requester for requester in asked if self._of_request[requester] < self._per_request
            ]
            for requester in sorted(askers, key=self._of_request.__getitem__):
                ticket = _first(asked[requester])
                if not asked[requester]:
                    del asked[requester]
                if ticket is not None:
                    return requester, ticket
            if not asked:
                del self._queues[client]
        return None

    def _count(self, requester: Requester, change: int) -> None:
        self._of_client[requester.client] += change
        self._of_request[requester] += change
        if not self._of_client[requester.client]:
            del self._of_client[requester.client]
        if not self._of_request[requester]:
            del self._of_request[requester]


def _first(queue: deque[Ticket]) -> Ticket | None:
    """Return the first ticket still waiting, and drop the dead tickets before."""
    while queue:
        ticket = queue.popleft()
        if not ticket.turn.done():
            return ticket
    return None


class Waiting(Protocol):
    """An entry that waits for its requester's turn."""

    @property
    def requester(self) -> Requester: ...

    @property
    def wanted(self) -> bool:
        """Return False once there are no waiters."""
        ...


T = TypeVar("T", bound=Waiting)


class Turns(Generic[T]):
    """FIFO among clients. A client that was served moves behind those that arrive before
    the next one is served. The same holds for one client's requests.
    """

    def __init__(self) -> None:
        self._clients: dict[str, dict[str, deque[T]]] = {}
        self._served: tuple[str, str] | None = None
        """The client, and the request, that had the last turn."""

    def __iter__(self) -> Iterator[T]:
        return (
            item
            for requests in self._clients.values()
            for queue in requests.values()
            for item in queue
        )

    def add(self, item: T) -> None:
        requests = self._clients.setdefault(item.requester.client, {})
        requests.setdefault(item.requester.request, deque()).append(item)

    def put_back(self, item: T) -> None:
        """Put an item first in line."""
        client, request = item.requester.client, item.requester.request
        requests = self._clients.pop(client, {})
        queue = deque([item, *requests.pop(request, ())])
        self._clients = {client: {request: queue, **requests}, **self._clients}
        self._served = None

    def take_next(self, fits: Callable[[T], bool] = lambda _: True) -> T | None:
        """Take the next item that fits out of the line, and drop unwanted ones."""
        self._go_behind()
        for client, requests in [*self._clients.items()]:
            for request, queue in [*requests.items()]:
                while queue and not queue[0].wanted:
                    queue.popleft()
                item = queue.popleft() if queue and fits(queue[0]) else None
                if not queue:
                    del requests[request]
                if not requests:
                    del self._clients[client]
                if item is not None:
                    self._served = client, request
                    return item
        return None

    def _go_behind(self) -> None:
        """Send whoever had the last turn to the end of the line."""
        client, request = self._served or ("", "")
        if self._served and (requests := self._clients.pop(client, {})):
            if queue := requests.pop(request, deque()):
                requests[request] = queue
            self._clients[client] = requests
