"""Fair queues for fetches and for image workers, so that no client and no request uses all the
capacity while others wait.

They are fair between clients, and between the requests of one client. Everything runs on one event
loop, without locks.
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
    """Limits how many bytes of a request the server holds in memory."""

    def reserve(self, nbytes: int) -> None:
        """Reserve `nbytes` before they arrive, or release them if negative.

        Raises Overloaded if the budget is currently used up, and TooLarge if the bytes exceed the
        entire budget.
        """
        ...

    async def settle(self, tenant: str) -> None:
        """Set the tenant of the request, once it is known."""
        ...

    def sent(self, tenant: str, name: str) -> bytes | None:
        """Return bytes that the tenant has sent before, or None if they are no longer stored.

        name: the digest of the bytes, as in `Digest.name`.
        """
        ...


class Boundless:
    """Implements `MemoryBudget` without a limit."""

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
    """Identifies a request and its client in the fair queues."""

    client: str = ""  # the unit of fairness
    owner: str = ""  # whose uploaded files the request may read
    budget: MemoryBudget = BOUNDLESS
    tenant: str = ""  # bytes of different tenants are isolated from each other in every process
    request: str = field(default_factory=lambda: str(next(_requests)))  # unique per client

    @classmethod
    def of(cls, client: Client, salt: str = "", budget: MemoryBudget = BOUNDLESS) -> Requester:
        """Create the requester for one request of a client."""
        return cls(client.share(salt), client.name, budget, client.tenant(salt))


@dataclass(slots=True, eq=False)
class Ticket:
    """A queue entry that waits for a permit, on behalf of one or more requesters.

    `turn` is set to the requester for which the permit counts.
    """

    turn: asyncio.Future[Requester] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class FairPermits:
    """A semaphore with `places` permits.

    One client can hold at most `per_client` of them, and one request at most `per_request`. A free
    permit goes to the client that holds the fewest, and among its requests to the request that
    holds the fewest. Ties are FIFO.
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
        """The number of tickets in the queue. A ticket with more than one requester counts for
        each.
        """
        queues = (queue for asked in self._queues.values() for queue in asked.values())
        return sum(not ticket.turn.done() for queue in queues for ticket in queue)

    def enter(self, ticket: Ticket, requester: Requester) -> None:
        """Let `requester` wait for a permit with `ticket`."""
        if not ticket.turn.done():
            asked = self._queues.setdefault(requester.client, {})
            asked.setdefault(requester, deque()).append(ticket)
            self._give_out()

    async def wait(self, ticket: Ticket, patience: float) -> None:
        """Wait until the ticket has a permit. Raises Overloaded after `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                await asyncio.shield(ticket.turn)
        except TimeoutError:
            raise Overloaded(
                f"{self.waiting} fetches are queued, and this request has waited for {patience:g} "
                "s: try again, with fewer images by URL"
            ) from None

    def leave(self, ticket: Ticket) -> None:
        """Release the permit of the ticket, or remove the ticket from the queue."""
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
    while queue:
        ticket = queue.popleft()
        if not ticket.turn.done():
            return ticket
    return None


class Waiting(Protocol):
    """An item of `Turns`."""

    @property
    def requester(self) -> Requester: ...

    @property
    def wanted(self) -> bool:
        """True until no call waits for the item any more."""
        ...


T = TypeVar("T", bound=Waiting)


class Turns(Generic[T]):
    """A queue that is round-robin between clients, and between the requests of each client.

    A client that was served goes to the end of the queue only when the next item is taken. So
    clients that arrive in between are ahead of it. The same holds for the requests of one client.
    """

    def __init__(self) -> None:
        self._clients: dict[str, dict[str, deque[T]]] = {}
        self._served: tuple[str, str] | None = None
        """The client and the request that were served last."""

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
        """Insert an item at the front of the queue."""
        client, request = item.requester.client, item.requester.request
        requests = self._clients.pop(client, {})
        queue = deque([item, *requests.pop(request, ())])
        self._clients = {client: {request: queue, **requests}, **self._clients}
        self._served = None

    def take_next(self, fits: Callable[[T], bool] = lambda _: True) -> T | None:
        """Remove and return the next item that fits, or None. Drop items that no call waits for."""
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
        """Move the client and the request that were served last to the end of the queue."""
        client, request = self._served or ("", "")
        if self._served and (requests := self._clients.pop(client, {})):
            if queue := requests.pop(request, deque()):
                requests[request] = queue
            self._clients[client] = requests
