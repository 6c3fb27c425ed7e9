"""Turns for what waits for a worker: between clients, and between one client's requests.

Owns what waits. Knows nothing of its price, which `decode_queue.py` counts for pixels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from saccade.media.sources.fairness import Requester


class Waiting(Protocol):
    """What waits for a turn of its asker."""

    @property
    def asker(self) -> Requester: ...

    @property
    def wanted(self) -> bool:
        """Return False once every waiter has gone."""
        ...


T = TypeVar("T", bound=Waiting)


class Turns(Generic[T]):
    """First come, first served among clients. Who was served goes behind those who have come until
    the next is served. The same holds for one client's requests.
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
        requests = self._clients.setdefault(item.asker.client, {})
        requests.setdefault(item.asker.request, deque()).append(item)

    def put_back(self, item: T) -> None:
        """Put an item first in line."""
        client, request = item.asker.client, item.asker.request
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
