"""Single-flight reads: concurrent requests for the same bytes share one read.

The bytes count in each requester's memory budget before they arrive. Everything runs on one event
loop, without locks.
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
    """A requester that waits for a read, and the number of bytes counted in its budget."""

    requester: Requester
    data: asyncio.Future[bytes]
    reserved: int = 0

    def reserve(self, nbytes: int) -> None:
        """Reserve `nbytes` in total for this requester.

        Raises Overloaded if the budget is currently used up, and TooLarge if the bytes exceed the
        entire budget.
        """
        if nbytes != self.reserved:
            self.requester.budget.reserve(nbytes - self.reserved)
            self.reserved = nbytes


@dataclass(slots=True, eq=False)
class ByteFlight:
    """One read in progress, and the requesters that wait for it."""

    ticket: Ticket = field(default_factory=Ticket)  # waits in the queue of `FairPermits`
    nbytes: int = 0  # reserved so far in each requester's budget
    seats: list[_Seat] = field(default_factory=list)

    def grow(self, nbytes: int) -> None:
        """Reserve `nbytes` in total in each waiting requester's budget, before the bytes are read.

        A requester whose budget is used up gets the error. Raises CancelledError if no requester is
        waiting any longer.
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
        """Pass the result or the error of the read to all waiting requesters."""
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
    """Runs at most one read per key at a time.

    on_join: called with each requester that waits for a read, and the read's ticket.
    """

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
        """Wait for the read of `key`, and return its bytes. If none is in progress, `bring` starts
        it.

        The bytes stay reserved in the requester's budget. A read is cancelled only when its last
        requester has been cancelled. Raises Overloaded or TooLarge if the bytes exceed the
        requester's budget, and the exceptions of `bring`.
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
        """Cancel all reads."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: Hashable, flight: ByteFlight) -> None:
        self._tasks.pop(flight, None)
        if self._flights.get(key) is flight:
            del self._flights[key]
