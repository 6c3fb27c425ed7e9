"""Reads image headers, or the metadata of videos, in a worker process that hostile bytes may crash.

Concurrent requests of one tenant for the same bytes share one read. An order contains bytes of one
tenant only.

Bytes that crashed a worker, or made it exceed a limit, are rejected for a while without trying them
again (`RefusedBytes`). This is recorded per tenant, because a compromised worker may report wrong
metadata for other bytes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from signal import SIGKILL
from typing import Any

from cachetools import TTLCache

from saccade.core.config import MIB
from saccade.core.errors import EngineUnavailable, ImageError
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions
from saccade.media.content import VIDEO, Probe
from saccade.media.reasons import Reason
from saccade.media.sources.fairness import Requester, Turns
from saccade.media.workers.decode_queue import BYTES_PER_PIXEL
from saccade.media.workers.fork_server import ForkServers
from saccade.media.workers.orders import HEADER_BYTES, VIDEO_CPU_SECONDS, Header, ReadHeaders
from saccade.media.workers.worker_slots import (
    BLAME,
    NO_TIME,
    SLACK_BYTES,
    TRIES,
    WorkerLost,
    WorkerSlot,
    WorkerSlots,
)

REFUSED = 1 << 12
REFUSED_SECONDS = 600.0
"""The maximum number of rejected bytes to remember, and for how long."""


class RefusedBytes:
    """Remembers the errors of bytes that are rejected without trying them again.

    `use` distinguishes operations on the same bytes.
    """

    def __init__(self) -> None:
        self._why: TTLCache[tuple[str, bytes, str], tuple[str, str | None]] = TTLCache(
            REFUSED, REFUSED_SECONDS
        )

    def add(self, tenant: str, digest: bytes, error: ImageError, use: str = "") -> None:
        self._why[tenant, digest, use] = error.message, error.code

    def check(self, tenant: str, digest: bytes, use: str = "") -> None:
        """Raise the ImageError that was recorded for these bytes, if any."""
        if found := self._why.get((tenant, digest, use)):
            message, code = found
            raise ImageError(message, code=code)


HEADER_SECONDS = 5.0
"""How long a worker may take for one header, in elapsed time. It is long because the machine may be
busy. The CPU time limit is much lower.
"""
VIDEO_SECONDS = VIDEO_CPU_SECONDS / BLAME
"""The same limit for a video's metadata."""
MAX_FRAMES, MAX_RATE = 1 << 20, 1e4
"""Maximum frames, and frames per second, of a video."""
MAX_MODE = 16
"""Maximum characters in the name of a Pillow mode, such as "I;16B"."""
BATCH_IMAGES = 16
"""Maximum headers in one order. It is low so that other requests do not wait long."""
BATCH_BYTES = 16 * MIB
"""Maximum encoded bytes in one order, unless it has a single image."""


@dataclass(slots=True, eq=False)
class Reading:
    """A header to read, for one or more calls of `read_header`."""

    digest: bytes
    data: bytes
    requester: Requester
    done: asyncio.Future[Probe]
    waiters: int = 0  # number of calls that wait for it
    tries: int = 0  # number of workers that exited or timed out while reading it

    @property
    def wanted(self) -> bool:
        return self.waiters > 0


class HeaderPool:
    """Reads the headers of a server's images, or the metadata of its videos if `videos` is True."""

    def __init__(
        self,
        options: MediaOptions,
        metrics: Metrics,
        fork_servers: ForkServers,
        refused: RefusedBytes,
        videos: bool = False,
    ) -> None:
        memory = HEADER_BYTES + 3 * options.max_image_bytes + SLACK_BYTES
        self.slots = WorkerSlots(
            fork_servers.readers, None, 1, memory, metrics, self._dispatch, self._fail
        )
        self._pixels = options.max_image_pixels
        self._videos = videos
        self._seconds = VIDEO_SECONDS if videos else HEADER_SECONDS
        self._metrics = metrics
        self._refused = refused
        self._turns: Turns[Reading] = Turns()
        self._readings: dict[tuple[str, bytes], Reading] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop the worker, and cancel all waiting calls."""
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.slots.close()
        for reading in self._readings.values():
            reading.done.cancel()

    async def read_header(self, digest: bytes, data: bytes, requester: Requester) -> Probe:
        """Return the header of `data`.

        Raises ImageError if the bytes cannot be read, and EngineUnavailable if the worker fails to
        start.

        digest: the blake3 hash of `data`.
        """
        self._refused.check(requester.tenant, digest)
        self.slots.start()
        name = requester.tenant, digest
        reading = self._readings.get(name)
        if reading is None:
            loop = asyncio.get_running_loop()
            reading = Reading(digest, data, requester, loop.create_future())
            reading.done.add_done_callback(_look_at_error)
            self._readings[name] = reading
            self._turns.add(reading)
            # Dispatch later, to batch the request's other images.
            loop.call_soon(self._dispatch)
        reading.waiters += 1
        try:
            found = await asyncio.shield(reading.done)
        finally:
            reading.waiters -= 1
            ended = not reading.waiters or reading.done.done()
            if ended and self._readings.get(name) is reading:
                del self._readings[name]
        return found

    def _dispatch(self) -> None:
        while self.slots.idle() and (readings := self._next()):
            requester = readings[0].requester
            slot = self.slots.idle(requester.tenant)
            assert slot is not None
            slot.client = requester.client
            task = asyncio.create_task(self._run(slot, readings))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self) -> list[Reading]:
        """Remove and return the headers of the next order.

        They are taken round-robin from requests of one tenant, up to the batch limits.
        """
        batch: list[Reading] = []
        most = 1 if self._videos else BATCH_IMAGES
        nbytes = 0

        def fits(reading: Reading) -> bool:
            if not batch:
                return self.slots.has_worker(reading.requester.client)
            return (
                reading.requester.tenant == batch[0].requester.tenant
                and nbytes + len(reading.data) <= BATCH_BYTES
            )

        while len(batch) < most and (reading := self._turns.take_next(fits)):
            batch.append(reading)
            nbytes += len(reading.data)
        return batch

    def _fail(self, why: str) -> None:
        for reading in self._readings.values():
            fail(reading.done, EngineUnavailable(why))

    # ---- one order

    async def _run(self, slot: WorkerSlot, readings: list[Reading]) -> None:
        try:
            await self._read(slot, readings)
        finally:
            slot.free()
        self._dispatch()

    async def _read(self, slot: WorkerSlot, readings: list[Reading]) -> None:
        """Read headers on the worker. If it fails, queue the headers it has not read again."""
        read = 0
        try:
            tenant = readings[0].requester.tenant
            parts = [reading.data for reading in readings]
            places = await self.slots.prepare(slot, parts, tenant)
            order = ReadHeaders(slot.number, slot.serial, places, self._pixels, self._videos)
            self.slots.send(slot, order)
            for reading in readings:
                async with asyncio.timeout(self._seconds):
                    header = await slot.answer()
                assert isinstance(header, Header)
                self._report(reading, header)
                read += 1
        except TimeoutError:
            if await self.slots.kill(slot) >= BLAME * self._seconds:
                self._refuse(readings[read], Reason("header time"))
                read += 1
            else:
                read += self._out_of_tries(readings[read], EngineUnavailable(NO_TIME))
        except WorkerLost as lost:
            if lost.late:
                self._refuse(readings[read], Reason("header time"))
                read += 1
            elif self._out_of_tries(readings[read], None):
                self._refuse(readings[read], Reason("header crash"), lost.signal)
                read += 1
        except EngineUnavailable as refused:
            for reading in readings:
                fail(reading.done, refused)
            return
        for reading in reversed(readings[read:]):
            self._turns.put_back(reading)

    def _out_of_tries(self, reading: Reading, error: Exception | None) -> bool:
        """Count one more failed try, and return True if no try is left.

        error: the exception to set on the reading if no try is left. None sets none.
        """
        reading.tries += 1
        if reading.tries < TRIES:
            return False
        if error is not None:
            fail(reading.done, error)
        return True

    def _report(self, reading: Reading, header: Header) -> None:
        self._metrics.inc("saccade_headers_read_total")
        if header.slow:
            self._refuse(reading, Reason("header time"))
        elif header.probe is None:
            reason = header.reason or Reason("header crash")
            fail(reading.done, ImageError(reason.text, code=reason.code))
        elif not _credible(header.probe, self._videos):
            self._refuse(reading, Reason("header crash"))
        elif not reading.done.done():
            reading.done.set_result(header.probe)

    def _refuse(self, reading: Reading, why: Reason, signal: int = 0) -> None:
        error = ImageError(why.text)
        if signal != SIGKILL:
            self._refused.add(reading.requester.tenant, reading.digest, error)
        fail(reading.done, error)


def _credible(probe: Probe, video: bool) -> bool:
    """Return True if the values are plausible.

    They may be forged if hostile bytes have taken control of the worker.
    """
    return (
        probe.format in BYTES_PER_PIXEL
        and min(probe.height, probe.width) >= 0
        and 1 <= probe.orientation <= 8
        and len(probe.mode) <= MAX_MODE
        and (probe.format == VIDEO) == video
        and (not video or (1 <= (probe.frames or 0) <= MAX_FRAMES and 0 < probe.fps < MAX_RATE))
    )


def fail(done: asyncio.Future[Any], error: Exception) -> None:
    """Set an error on a future, unless it is already done."""
    if not done.done():
        done.set_exception(error)


def _look_at_error(done: asyncio.Future[Probe]) -> None:
    """Retrieve the error of a future, so that asyncio does not warn if all waiting calls were
    cancelled.
    """
    if not done.cancelled():
        done.exception()
