"""Pixels by key: one decode per picture in flight, whoever asks and whoever goes away.

Ties the decode workers (`pool.py`) to the arena's slots (`slots.py`). Knows nothing of requests or
of the engine: it is told what may be wanted (`ahead`), asked for what is (`pixels`), and told what
no longer is (`drop`). Failures are not remembered.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from saccade.core.metrics import Metrics
from saccade.core.plan import PixelSlot
from saccade.core.types import ImageKey
from saccade.media.lru import LRU
from saccade.media.pool import DecodePool
from saccade.media.slots import Slots
from saccade.media.turns import Job

REMEMBERED_TIMES = 1 << 12


@dataclass(slots=True, eq=False)
class Flight:
    """One decode under way, from waiting for room to pixels in the arena.

    `askers` wait for its slot. `needed`: a request in flight may yet ask for it.
    """

    job: Job
    task: asyncio.Task[PixelSlot]
    askers: int = 0
    needed: bool = True


class Decoders:
    """Single flight per key over a pool of decode workers."""

    def __init__(self, pool: DecodePool, slots: Slots, metrics: Metrics) -> None:
        self._pool = pool
        self._slots = slots
        self._metrics = metrics
        self._flights: dict[ImageKey, Flight] = {}
        self.decode_ms: LRU[ImageKey, float] = LRU(REMEMBERED_TIMES)

    def ahead(self, key: ImageKey, job: Job) -> None:
        """Decode before anyone asks, unless that is under way, done, or would fill more of the
        arena than decoding ahead may.
        """
        if key in self._flights:
            self._flights[key].needed = True
        elif key not in self._slots and job.nbytes <= self._slots.ahead_limit:
            self._launch(key, job)

    async def pixels(self, key: ImageKey, job: Job) -> PixelSlot:
        """The slot that holds the picture's pixels; it is the caller's until `Slots.done`. `job` is
        used if no decode is under way.

        Raises ImageError when the bytes cannot be decoded, EngineUnavailable when no decode worker
        starts.
        """
        slot = self._slots.lease(key)
        if slot is not None:
            return slot
        flight = self._flights.get(key) or self._launch(key, job)
        flight.askers += 1
        flight.job.urgent = True
        self._slots.admit()
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if (
                flight.task.done()
                and not flight.task.cancelled()
                and flight.task.exception() is None
            ):
                self._slots.done(flight.task.result())
            flight.askers -= 1
            raise

    def drop(self, key: ImageKey) -> None:
        """No request in flight needs this picture: forget its decode if nobody asked for it and no
        worker has begun.
        """
        self._slots.settle(key)
        flight = self._flights.get(key)
        if flight is None:
            return
        flight.needed = False
        if flight.askers == 0 and not flight.job.running:
            del self._flights[key]
            flight.task.cancel()

    async def close(self) -> None:
        """End all decodes, then the workers."""
        await self._pool.close()
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _launch(self, key: ImageKey, job: Job) -> Flight:
        flight = Flight(job, asyncio.create_task(self._fly(key, job)))
        flight.task.add_done_callback(_look_at_error)
        self._flights[key] = flight
        return flight

    async def _fly(self, key: ImageKey, job: Job) -> PixelSlot:
        try:
            offset = await self._slots.reserve(job)
            try:
                await self._pool.decode(job, offset)
            except BaseException:
                self._slots.cancel(offset)
                raise
        except BaseException:
            if (
                key in self._flights and self._flights[key].job is job
            ):  # not the flight of someone who came after a `drop`
                del self._flights[key]
            raise
        flight = self._flights.pop(key)
        self.decode_ms.put(key, job.ms)
        self._metrics.inc("saccade_images_decoded_total")
        return self._slots.fill(
            key, offset, leases=flight.askers, ahead=flight.needed and flight.askers == 0
        )


def _look_at_error(task: asyncio.Task[PixelSlot]) -> None:
    """A decode ahead that fails has nobody to tell: whoever asks later decodes again and hears of
    it then.
    """
    if not task.cancelled():
        task.exception()
