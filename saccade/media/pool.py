"""Headers read and images decoded, by processes that hostile bytes may kill.

Owns the queues for image workers, and the digests refused for a while because they cost a worker.
One image alone bears the harm of its bytes. The same bytes are read or decoded once at a time, for
all waiting requests; work that nobody waits for is dropped, and its worker stopped. Knows nothing
of keys; the caller has reserved the memory that workers write to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Any

from cachetools import TTLCache

from saccade.core.arena import Arena
from saccade.core.config import MIB
from saccade.core.errors import EngineUnavailable, ImageError
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions
from saccade.core.recipe import OwnProcessor
from saccade.media.content import VIDEO, Probe
from saccade.media.decode_queue import BYTES_PER_PIXEL, THREADS, Job, JobQueue, decoding_bytes
from saccade.media.lanes import Lanes, WorkerLane, WorkerLost
from saccade.media.stock import Stocks
from saccade.media.worker import HEADER_BYTES, Decode, Decoded, Header, ReadHeaders

TRIES = 2
"""Tries per image that loses its worker: the second tells a bad image from bad luck. There is none
after a time-out in which the worker has computed.
"""
BLAME = 0.25
"""Share of a time limit that a worker must have computed for its image to bear the blame. Else the
worker was stopped, or the machine was: what time has passed says nothing of an image.
"""
GRACE_SECONDS = 0.2
"""How long a decode may go on that nobody waits for: most end sooner, and the worker is kept."""
HEADER_SECONDS = 5.0
"""How long a worker may take over one header before it is taken for stuck, on a busy machine. (Its
processor time is limited to far less.)
"""
SLACK_BYTES = 128 * MIB
"""Address space of a worker beside the price of its images, for what the allocator rounds up."""

NO_TIME = "the image workers get no processor time: try again"

REFUSED_IMAGES = 1 << 12
REFUSED_SECONDS = 600.0
"""How many digests are refused after they cost a worker, and for how long."""

MOST_FRAMES, MOST_RATE = 1 << 20, 1e4
"""Of a video, and how many a second it may have."""
LONGEST_MODE = 16
"""Characters of a mode's name in Pillow: "I;16B" and the like."""

BATCH_IMAGES = 16
"""Headers in one order: few, for all requests take turns."""
BATCH_BYTES = 16 * MIB
"""Encoded bytes in one order of headers, unless it has one image only."""


@dataclass(slots=True, eq=False)
class Reading:
    """A header to be read, for `waiters` calls. `tries` counts workers lost."""

    digest: bytes
    data: bytes
    done: asyncio.Future[Probe]
    waiters: int = 0
    tries: int = 0
    video: bool = False


@dataclass(slots=True, eq=False)
class Decoding:
    """A job, its place in the arena, and its end. `tries` counts workers lost.

    `batch` decodes the job; None while waiting.
    """

    job: Job
    offset: int
    done: asyncio.Future[None]
    tries: int = 0
    batch: DecodeBatch | None = None


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """One decode of some bytes, for several sizes. `ended`: no worker writes for the batch now."""

    works: list[Decoding]
    memory: int
    limit: asyncio.Timeout
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def wanted(self) -> bool:
        return any(not work.done.done() for work in self.works)

    def hurry(self, when: float) -> None:
        """Have the decode end by then, if under way."""
        with suppress(RuntimeError):  # it has yet to begin, or has just ended
            if when < (self.limit.when() or when):
                self.limit.reschedule(when)


class HeaderQueue:
    """Headers waiting to be read; requests take turns."""

    def __init__(self) -> None:
        self._requests: dict[str, deque[Reading]] = {}

    def __iter__(self) -> Iterator[Reading]:
        return (reading for queue in self._requests.values() for reading in queue)

    def add(self, reading: Reading, request: str) -> None:
        self._requests.setdefault(request, deque()).append(reading)

    def put_back(self, readings: list[Reading]) -> None:
        """Put headers first in line."""
        first = deque([*readings, *self._requests.pop("", ())])
        self._requests = {"": first, **self._requests}

    def take(self) -> list[Reading]:
        """The next order: one header of each request in turn, as far as room allows."""
        batch: list[Reading] = []
        nbytes = 0
        while self._requests and len(batch) < BATCH_IMAGES and not (batch and batch[0].video):
            request = next(iter(self._requests))
            queue = self._requests.pop(request)
            while queue and not queue[0].waiters:
                queue.popleft()
            if not queue:
                continue
            if batch and (queue[0].video or nbytes + len(queue[0].data) > BATCH_BYTES):
                self._requests = {request: queue, **self._requests}
                break
            reading = queue.popleft()
            batch.append(reading)
            nbytes += len(reading.data)
            if queue:
                self._requests[request] = queue  # behind the others
        return batch


class DecodePool:
    """All image workers of one server, over one arena."""

    def __init__(
        self,
        arena: Arena,
        options: MediaOptions,
        metrics: Metrics,
        stocks: Stocks | None = None,
        processor: OwnProcessor | None = None,
    ) -> None:
        """`stocks`: shared with other pools, and ended by their maker; else of this pool alone, and
        with `processor` loaded, as `worker.Boot` names it.
        """
        self._own_stocks = Stocks.preloading(processor) if stocks is None else None
        stocks = stocks or self._own_stocks
        assert stocks is not None
        self._options = options
        self._metrics = metrics
        header = HEADER_BYTES + 3 * options.max_image_bytes + SLACK_BYTES
        self._readers = Lanes(
            stocks.readers,
            None,
            1,
            header,
            metrics,
            self._dispatch_readings,
            self._fail_readings,
        )
        # An image's price counts its bytes twice; the worker's view of them is beside it.
        pixels = options.decode_memory * 3 // 2 + SLACK_BYTES
        self._decoders = Lanes(
            stocks.decoders,
            arena,
            options.workers,
            pixels,
            metrics,
            self._dispatch_jobs,
            self._fail_jobs,
        )
        self._headers = HeaderQueue()
        self._readings: dict[tuple[bytes, bool], Reading] = {}
        self._turns = JobQueue(options.decode_memory)
        self._waiting: dict[Job, Decoding] = {}
        self._batches: dict[bytes, DecodeBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused: TTLCache[bytes, str] = TTLCache(REFUSED_IMAGES, REFUSED_SECONDS)

    def start(self) -> None:
        """Start the workers in the background, on the running loop; work waits until they are
        ready.
        """
        self._readers.start()
        self._decoders.start()

    async def close(self) -> None:
        """End the workers, and cancel all waiting work."""
        running = [work for batch in self._batches.values() for work in batch.works]
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(self._readers.close(), self._decoders.close())
        if self._own_stocks is not None:
            await asyncio.to_thread(self._own_stocks.close)
        for reading in self._readings.values():
            reading.done.cancel()
        for work in (*running, *self._waiting.values()):
            work.done.cancel()

    # ---- what callers wait for

    async def read_header(
        self, digest: bytes, data: bytes, request: str = "", video: bool = False
    ) -> Probe:
        """The header of an image, or the card of a video. `digest` names its bytes; requests take
        turns.

        Raises ImageError for bytes of no image decoded here, EngineUnavailable when no worker
        starts.
        """
        self._check_refused(digest)
        name = digest, video
        reading = self._readings.get(name)
        if reading is None:
            done: asyncio.Future[Probe] = asyncio.get_running_loop().create_future()
            reading = Reading(digest, data, done, video=video)
            reading.done.add_done_callback(_look_at_error)
            self._readings[name] = reading
            self._headers.add(reading, request)
            # Soon, not now: the other images of the request go with it.
            asyncio.get_running_loop().call_soon(self._dispatch_readings)
        reading.waiters += 1
        try:
            found = await asyncio.shield(reading.done)
        finally:
            reading.waiters -= 1
            ended = not reading.waiters or reading.done.done()
            if ended and self._readings.get(name) is reading:
                del self._readings[name]
        return found

    async def decode(self, job: Job, offset: int) -> None:
        """Decode `job` to `offset` in the arena. Raises ImageError for a job that fails,
        EngineUnavailable when no worker starts.

        After the call's end, also by cancellation, nothing writes to the arena for the job. The
        work of a cancelled call ends too, unless other calls wait for the same bytes.
        """
        self._check_refused(job.digest)
        work = Decoding(job, offset, asyncio.get_running_loop().create_future())
        self._wait(work)
        # Soon, not now: other sizes of the same bytes go with it.
        asyncio.get_running_loop().call_soon(self._dispatch_jobs)
        try:
            await work.done
        except asyncio.CancelledError:
            work.done.cancel()
            if job in self._waiting:
                self._leave(work)
            elif work.batch is not None:
                await self._abandon(work.batch)
            raise

    async def _abandon(self, batch: DecodeBatch) -> None:
        """Return when nothing writes for a batch that one call has given up."""
        if not batch.wanted:
            batch.hurry(asyncio.get_running_loop().time() + GRACE_SECONDS)
        while not batch.ended.is_set():
            try:
                await batch.ended.wait()
            except asyncio.CancelledError:  # once was enough: the slot must be safe
                continue

    def _check_refused(self, digest: bytes) -> None:
        if why := self._refused.get(digest):
            raise ImageError(why)

    # ---- who is next

    def _wait(self, work: Decoding) -> None:
        work.batch = None
        work.job.running = False
        self._waiting[work.job] = work
        self._turns.add(work.job)

    def _leave(self, work: Decoding) -> None:
        del self._waiting[work.job]
        self._turns.remove(work.job)

    def _dispatch_readings(self) -> None:
        """Give headers to an idle worker."""
        if (lane := self._readers.idle()) and (readings := self._headers.take()):
            self._run(lane, self._read(lane, readings), self._dispatch_readings)

    def _dispatch_jobs(self) -> None:
        """Give jobs to idle workers."""
        while self._waiting and (lane := self._decoders.idle()):
            in_use = sum(batch.memory for batch in self._batches.values())
            jobs = self._turns.take(in_use, self._batches.keys())
            if not jobs:
                return
            works = [self._waiting.pop(job) for job in jobs]
            self._run(lane, self._decode(lane, works), self._dispatch_jobs)

    def _run(
        self, lane: WorkerLane, work: Coroutine[None, None, None], then: Callable[[], None]
    ) -> None:
        """Have a lane do some work, and `then` look for more."""
        lane.busy = True

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            lane.busy = False
            if not task.cancelled():
                task.result()
                lane.empty()
                then()

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(over)

    def _fail_readings(self, why: str) -> None:
        for reading in self._readings.values():
            _fail(reading.done, EngineUnavailable(why))

    def _fail_jobs(self, why: str) -> None:
        for work in [*self._waiting.values()]:
            self._leave(work)
            _fail(work.done, EngineUnavailable(why))

    # ---- headers

    async def _read(self, lane: WorkerLane, readings: list[Reading]) -> None:
        """Have one worker read some headers. Headers left over wait again."""
        places = await self._readers.prepare(lane, [reading.data for reading in readings])
        pixels = self._options.max_image_pixels
        read = 0
        try:
            videos = readings[0].video
            order = ReadHeaders(lane.number, lane.serial, places, pixels, videos)
            self._readers.send(lane, order)
            for reading in readings:
                async with asyncio.timeout(HEADER_SECONDS):
                    header = await lane.answer()
                assert isinstance(header, Header)
                self._read_one(reading, header)
                read += 1
        except TimeoutError:
            if await self._readers.kill(lane) >= BLAME * HEADER_SECONDS:
                self._refuse_header(readings[read], "reading the image's header takes too long")
                read += 1
            else:
                read += self._try_again(readings[read])
        except WorkerLost as lost:
            readings[read].tries += 1
            if readings[read].tries >= TRIES:
                self._refuse_header(
                    readings[read], "the image's header crashes its reader", lost.signal
                )
                read += 1
        self._headers.put_back(readings[read:])

    def _try_again(self, reading: Reading) -> bool:
        """Count a reading's lost worker. True if no try is left."""
        reading.tries += 1
        if reading.tries < TRIES:
            return False
        _fail(reading.done, EngineUnavailable(NO_TIME))
        return True

    def _read_one(self, reading: Reading, header: Header) -> None:
        self._metrics.inc("saccade_headers_read_total")
        if header.slow:
            self._refuse_header(reading, header.error)
        elif header.probe is not None and not _credible(header.probe, reading.video):
            self._refuse_header(reading, "the image's header crashes its reader")
        elif header.probe is None:
            _fail(reading.done, ImageError(header.error, code=header.code))
        elif not reading.done.done():
            reading.done.set_result(header.probe)

    def _refuse_header(self, reading: Reading, why: str, signal: int = 0) -> None:
        if signal != SIGKILL:
            self._refused[reading.digest] = why
        _fail(reading.done, ImageError(why))

    # ---- pixels

    async def _decode(self, lane: WorkerLane, works: list[Decoding]) -> None:
        """Have one worker decode some bytes, for the recipes of all `works`."""
        job = works[0].job
        memory = decoding_bytes(job.probe, len(job.data), [work.job.recipe for work in works])
        if job.frame is not None:
            self._metrics.inc("saccade_video_frames_decoded_total", len(works))
        error: str | None = None
        limit = asyncio.timeout(None)
        batch = self._batches[job.digest] = DecodeBatch(works, memory, limit)
        for work in works:
            work.batch = batch
            work.job.running = True
        try:
            await self._decoders.prepare(lane, [job.data])
            if batch.wanted:
                async with limit:
                    seconds = self._options.decode_timeout
                    limit.reschedule(asyncio.get_running_loop().time() + seconds)
                    answer = await self._order(lane, batch)
                error = answer.error
                for work in works:
                    work.job.ms = answer.ms
        except TimeoutError:
            cpu = await self._decoders.kill(lane)
            error = self._late(batch, cpu) if batch.wanted else None
        except WorkerLost as lost:
            error = self._lost(batch, lost.signal)
        finally:
            del self._batches[job.digest]
            batch.ended.set()
        self._settle(batch, error)

    async def _order(self, lane: WorkerLane, batch: DecodeBatch) -> Decoded:
        """The worker's answer. Raises WorkerLost."""
        job = batch.works[0].job
        self._metrics.inc("saccade_decodes_total")
        order = Decode(
            lane.number,
            lane.serial,
            len(job.data),
            job.probe.upright,
            job.probe.orientation,
            tuple((work.offset, work.job.recipe) for work in batch.works),
            batch.memory + SLACK_BYTES,
            THREADS.get(job.probe.format, 0),
            tuple(work.job.frame for work in batch.works if work.job.frame is not None),
        )
        self._decoders.send(lane, order)
        answer = await lane.answer()
        assert isinstance(answer, Decoded)
        return answer

    def _late(self, batch: DecodeBatch, cpu: float) -> str | None:
        """The worker was given up after `cpu` seconds of processor time: as `_lost`."""
        limit = self._options.decode_timeout
        if cpu >= BLAME * limit:
            error = f"decoding it takes longer than {limit:g} s"
            self._refused[batch.works[0].job.digest] = f"the image cannot be decoded: {error}"
            return error
        left = self._left(batch)
        for work in left or ():
            _fail(work.done, EngineUnavailable(NO_TIME))
        return None

    def _left(self, batch: DecodeBatch) -> list[Decoding] | None:
        """The worker has ended: returns the calls still waiting, one of them with no try left.
        None: all wait again.
        """
        left = [work for work in batch.works if not work.done.done()]
        for work in left:
            work.tries += 1
        if any(work.tries >= TRIES for work in left):
            return left
        for work in left:
            self._wait(work)
        batch.works = []
        return None

    def _lost(self, batch: DecodeBatch, signal: int) -> str | None:
        """The worker has ended: the error for the image's waiting calls, if not tried again."""
        left = self._left(batch)
        if not left:
            return None
        if signal != SIGKILL:
            self._refused[left[0].job.digest] = "the image cannot be decoded: its decoder crashed"
        return "its decoder crashed"

    def _settle(self, batch: DecodeBatch, error: str | None) -> None:
        """Tell all calls waiting for a batch, and for the same bytes if bad."""
        works = batch.works
        if error is not None and works:
            digest = works[0].job.digest
            later = [work for work in self._waiting.values() if work.job.digest == digest]
            for work in later:
                self._leave(work)
            works = [*works, *later]
        for work in works:
            work.job.running = False
            if error is not None:
                _fail(work.done, ImageError(f"the image cannot be decoded: {error}"))
            elif not work.done.done():
                work.done.set_result(None)


def _credible(probe: Probe, video: bool) -> bool:
    """True if a sound worker can have sent the answer: hostile bytes may speak for theirs."""
    return (
        probe.format in BYTES_PER_PIXEL
        and min(probe.height, probe.width) >= 0
        and 1 <= probe.orientation <= 8
        and len(probe.mode) <= LONGEST_MODE
        and (probe.format == VIDEO) == video
        and (not video or (1 <= (probe.frames or 0) <= MOST_FRAMES and 0 < probe.fps < MOST_RATE))
    )


def _fail(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def _look_at_error(done: asyncio.Future[Probe]) -> None:
    """Look at an error that no waiting call may be left to see."""
    if not done.cancelled():
        done.exception()
