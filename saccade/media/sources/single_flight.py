"""Bytes on their way: all askers for the same bytes share one flight, and each has counted the
bytes before their arrival.

Owns the waiting askers. One event loop; no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from saccade.core.errors import RequestError
from saccade.media.sources.fairness import Requester, Ticket

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Seat:
    """One waiting requester."""

    requester: Requester
    data: asyncio.Future[bytes]
    reserved: int = 0

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` in all for this requester. Raises as `MemoryBudget.reserve` does."""
        if nbytes != self.reserved:
            self.requester.budget.reserve(nbytes - self.reserved)
            self.reserved = nbytes


@dataclass(slots=True, eq=False)
class ByteFlight:
    """Bytes on their way. `ticket` waits for a turn on their behalf."""

    ticket: Ticket = field(default_factory=Ticket)
    nbytes: int = 0
    seats: list[_Seat] = field(default_factory=list)

    def grow(self, nbytes: int) -> None:
        """Count `nbytes` in each waiting requester's budget before they come. A requester whose
        budget is used up gets the error.

        Raises CancelledError if all requesters disconnected.
        """
        self.nbytes = max(self.nbytes, nbytes)
        for seat in self.seats:
            if not seat.data.done():
                try:
                    seat.reserve(self.nbytes)
                except RequestError as error:
                    seat.data.set_exception(error)
        if all(seat.data.done() for seat in self.seats):
            raise asyncio.CancelledError

    def land(self, task: asyncio.Task[bytes]) -> None:
        """Pass the result or the error to all waiting askers."""
        error = None if task.cancelled() else task.exception()
        for seat in self.seats:
            if seat.data.done():
                continue
            if task.cancelled():
                seat.data.cancel()
            elif error is not None:
                seat.data.set_exception(error)
            else:
                seat.data.set_result(task.result())


class SingleFlight:
    """At most one flight per key. `on_join` hears of every requester who joins a flight."""

    def __init__(self, on_join: Callable[[Ticket, Requester], None] | None = None) -> None:
        self._on_join = on_join
        self._flights: dict[Hashable, ByteFlight] = {}
        self._tasks: dict[ByteFlight, asyncio.Task[bytes]] = {}

    async def join(
        self,
        key: Hashable,
        requester: Requester,
        bring: Callable[[ByteFlight], Coroutine[None, None, bytes]],
    ) -> bytes:
        """Return the bytes from `bring`, which stay counted in the requester's budget.

        The fetch is cancelled only when the last requester has disconnected. Raises as `bring` and
        `MemoryBudget.reserve` do.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = ByteFlight()
            task = self._tasks[flight] = asyncio.create_task(bring(flight))
            task.add_done_callback(flight.land)
            task.add_done_callback(lambda _: self._forget(key, flight))
        seat = _Seat(requester, asyncio.get_running_loop().create_future())
        flight.seats.append(seat)
        try:
            seat.reserve(flight.nbytes)
            if self._on_join is not None:
                self._on_join(flight.ticket, requester)
            data = await seat.data
            seat.reserve(len(data))
            return data
        except BaseException:
            seat.reserve(0)
            raise
        finally:
            flight.seats.remove(seat)
            if not flight.seats and (left := self._tasks.get(flight)):
                self._forget(key, flight)
                left.cancel()

    async def close(self) -> None:
        """End all flights."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: Hashable, flight: ByteFlight) -> None:
        self._tasks.pop(flight, None)
        if self._flights.get(key) is flight:
            del self._flights[key]
