"""Decodes images in worker processes, which hostile bytes may crash. `header_pool.py` reads the
headers.

If an image crashes its worker, only requests with this image fail. Concurrent decodes of the same
bytes from one tenant share one decode. If every request for a decode is cancelled, it is dropped,
or its worker is stopped. The caller has to reserve the arena memory that workers write to.

`Decoders` tracks the decodes into the engine's slots in the arena, one per image. An image has one
frame, or the two frames of a video that one canvas holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from signal import SIGKILL
from typing import Any, Protocol

from saccade.core.arena import Arena
from saccade.core.errors import EngineUnavailable, ImageError
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions
from saccade.core.plan import PixelSlot
from saccade.core.recipe import OwnPixels
from saccade.core.types import ImageKey
from saccade.media.content import RAW
from saccade.media.reasons import Reason
from saccade.media.workers.decode_queue import THREADS, Job, JobBatch, JobQueue
from saccade.media.workers.fork_server import ForkServers
from saccade.media.workers.header_pool import HeaderPool, RefusedBytes, fail
from saccade.media.workers.orders import TO_FRONT, Decode, Decoded
from saccade.media.workers.worker_slots import (
    BLAME,
    NO_TIME,
    SLACK_BYTES,
    TRIES,
    WorkerLost,
    WorkerSlot,
    WorkerSlots,
)

GRACE_SECONDS = 0.2
"""How long a cancelled decode may continue. Most finish in time, so that their worker need not be
killed.
"""
_WORDS = "the image cannot be decoded: "


@dataclass(slots=True, eq=False)
class Decoding:
    """A call of `DecodePool.decode` that has not returned."""

    job: Job
    offset: int  # offset in the arena, or `TO_FRONT`
    done: asyncio.Future[None]
    tries: int = 0  # how many workers exited while decoding it
    batch: DecodeBatch | None = None  # `None` while the job waits
    pixels: bytes = b""  # the result, if the job returns pixels to the front end


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """One decode of an image's bytes, and the calls that wait for it."""

    works: list[Decoding]
    taken: JobBatch
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set once no more is written

    @property
    def wanted(self) -> bool:
        return any(not work.done.done() for work in self.works)

    def hurry(self, when: float) -> None:
        """Move a running decode's deadline forward to `when`."""
        with suppress(RuntimeError):  # it has not started yet, or has just ended
            if when < (self.limit.when() or when):
                self.limit.reschedule(when)


class DecodePool:
    """Decodes images into one arena, in all image workers of a server."""

    def __init__(
        self,
        arena: Arena,
        options: MediaOptions,
        metrics: Metrics,
        fork_servers: ForkServers | None = None,
        own: OwnPixels | None = None,
    ) -> None:
        """Create the pool without starting a process.

        fork_servers: shared with other pools, and closed by the caller. If None, the pool creates
            and closes its own ones.
        own: the model family's preprocessing operation, which the pool's own fork servers load.
        """
        self._own_fork_servers = ForkServers.preloading(own) if fork_servers is None else None
        fork_servers = fork_servers or self._own_fork_servers
        assert fork_servers is not None
        self._options = options
        self._metrics = metrics
        self._refused = RefusedBytes()
        self.headers = HeaderPool(options, metrics, fork_servers, self._refused)
        # Videos have a separate pool, since reading their metadata takes longer than a header.
        self.video_headers = HeaderPool(options, metrics, fork_servers, self._refused, videos=True)
        # `decoding_bytes` counts an image's encoded bytes twice. The worker also maps them.
        pixels = options.decode_memory * 3 // 2 + SLACK_BYTES
        self._decoders = WorkerSlots(
            fork_servers.decoders,
            arena,
            options.workers,
            pixels,
            metrics,
            self._dispatch,
            self._fail_jobs,
        )
        self._turns = JobQueue(options.decode_memory)
        self._waiting: dict[Job, Decoding] = {}
        self._batches: dict[tuple[str, bytes], DecodeBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the workers in the background, on the running event loop.

        Jobs wait until workers are ready. The worker for videos is started with the first video.
        """
        self.headers.slots.start()
        self._decoders.start()

    async def close(self) -> None:
        """Stop the workers, and cancel all waiting calls."""
        running = [work for batch in self._batches.values() for work in batch.works]
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(
            self.headers.close(), self.video_headers.close(), self._decoders.close()
        )
        if self._own_fork_servers is not None:
            await asyncio.to_thread(self._own_fork_servers.close)
        for work in (*running, *self._waiting.values()):
            work.done.cancel()

    def settle(self, unsettled: str, tenant: str) -> None:
        """Assign the workers and bytes of the placeholder `unsettled` to `tenant`, now known."""
        self.headers.slots.settle(unsettled, tenant)
        self._decoders.settle(unsettled, tenant)

    def check_refused(self, tenant: str, digest: bytes) -> None:
        """Raise ImageError for bytes that have crashed a worker."""
        self._refused.check(tenant, digest)

    # ---- called by the front end

    async def decode(self, job: Job, offset: int = TO_FRONT) -> bytes:
        """Decode `job` to `offset` in the arena and return b"".

        If the job has `returned` set, return the pixels instead. The arena is not written for this
        job after the call has ended or was cancelled. The decode of a cancelled call is stopped
        unless other calls wait for the same bytes. Raises ImageError if decoding fails, and
        EngineUnavailable if the workers fail to start.
        """
        self._refused.check(job.tenant, job.digest)
        work = Decoding(job, offset, asyncio.get_running_loop().create_future())
        self._wait(work)
        # Dispatch later, to batch other jobs for the same bytes that are added in this iteration.
        asyncio.get_running_loop().call_soon(self._dispatch)
        try:
            await work.done
        except asyncio.CancelledError:
            work.done.cancel()
            if job in self._waiting:
                self._leave(work)
            elif work.batch is not None:
                await self._abandon(work.batch)
            raise
        return work.pixels

    async def _abandon(self, batch: DecodeBatch) -> None:
        """Wait until a batch has finished writing, after one of its calls was cancelled."""
        if not batch.wanted:
            batch.hurry(asyncio.get_running_loop().time() + GRACE_SECONDS)
        while not batch.ended.is_set():
            try:
                await batch.ended.wait()
            except asyncio.CancelledError:  # cancelled again: the slot may still be written
                continue

    # ---- scheduling

    def _wait(self, work: Decoding) -> None:
        work.batch = None
        work.job.running = False
        self._waiting[work.job] = work
        self._turns.add(work.job)

    def _leave(self, work: Decoding) -> None:
        del self._waiting[work.job]
        self._turns.remove(work.job)

    def _dispatch(self) -> None:
        while self._waiting and self._decoders.idle():
            running = [batch.taken for batch in self._batches.values()]
            taken = self._turns.take_jobs(running, self._decoders.has_worker)
            if taken is None:
                return
            slot = self._decoders.idle(taken.first.tenant)
            assert slot is not None
            slot.client = taken.first.client
            task = asyncio.create_task(self._run(slot, self._decode(slot, self._batch(taken))))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _batch(self, taken: JobBatch) -> DecodeBatch:
        """Return a batch of jobs, and count them as running even before their task begins.

        Otherwise the choice of the next jobs, which follows at once, would not see their memory.
        """
        batch = DecodeBatch([self._waiting.pop(job) for job in taken.jobs], taken)
        self._batches[taken.first.name] = batch
        for work in batch.works:
            work.batch = batch
            work.job.running = True
        return batch

    async def _run(self, slot: WorkerSlot, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        finally:
            slot.free()
        self._dispatch()

    def _fail_jobs(self, why: str) -> None:
        for work in [*self._waiting.values()]:
            self._leave(work)
            fail(work.done, EngineUnavailable(why))

    # ---- pixels

    async def _decode(self, slot: WorkerSlot, batch: DecodeBatch) -> None:
        """Decode an image on one worker, and complete all calls of `batch`."""
        works = batch.works
        job = works[0].job
        if job.frame is not None:
            self._metrics.inc("saccade_video_frames_decoded_total", len(works))
        error: str | None = None
        try:
            await self._decoders.prepare(slot, [job.data], job.tenant)
            if batch.wanted:
                async with batch.limit:
                    seconds = self._options.decode_timeout
                    batch.limit.reschedule(asyncio.get_running_loop().time() + seconds)
                    answer = await self._order(slot, batch)
                error = None if answer.reason is None else answer.reason.text
                for work in works:
                    work.job.ms, work.job.ended = answer.ms, time.monotonic()
        except TimeoutError:
            cpu = await self._decoders.kill(slot)
            error = self._late(batch, cpu) if batch.wanted else None
        except WorkerLost as lost:
            error = self._lost(batch, lost.signal)
        except EngineUnavailable as refused:
            for work in batch.works:
                fail(work.done, refused)
        finally:
            del self._batches[job.name]
            batch.ended.set()
        self._settle(batch, error)
        batch.works = []  # break the reference cycle, which would keep the image's bytes in memory

    async def _order(self, slot: WorkerSlot, batch: DecodeBatch) -> Decoded:
        job = batch.works[0].job
        if job.probe.format != RAW:
            self._metrics.inc("saccade_decodes_total")
        regions = tuple(work.job.region for work in batch.works)
        order = Decode(
            slot.number,
            slot.serial,
            len(job.data),
            job.probe.upright,
            job.probe.orientation,
            tuple((work.offset, work.job.recipe) for work in batch.works),
            batch.taken.memory + SLACK_BYTES,
            THREADS.get(job.probe.format, 0),
            tuple(work.job.frame for work in batch.works if work.job.frame is not None),
            regions if any(regions) else (),
        )
        self._decoders.send(slot, order)
        answer = await slot.answer()
        assert isinstance(answer, Decoded)
        if answer.reason is None:
            for number, work in enumerate(batch.works):
                if work.job.returned:
                    at = order.answer_at + order.outbox[number]
                    work.pixels = await slot.answered(at, 3 * prod(work.job.recipe.canvas))
        return answer

    def _late(self, batch: DecodeBatch, cpu: float) -> str | None:
        """Handle a worker that exceeded the time limit.

        Returns the error for the image's calls if its decoding is too slow. Returns None if the
        calls were queued again, or failed because the machine is too busy.

        cpu: the CPU time that the worker used, in seconds.
        """
        limit = self._options.decode_timeout
        if cpu >= BLAME * limit:
            return self._refuse(batch, f"decoding it takes longer than {limit:g} s")
        left = self._left(batch)
        for work in left or ():
            fail(work.done, EngineUnavailable(NO_TIME))
        return None

    def _left(self, batch: DecodeBatch) -> list[Decoding] | None:
        """Count a lost worker, and queue the batch's calls again.

        Returns None, unless one of the calls has used up its tries. In that case, returns the calls
        that still wait.
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
        """Handle a worker that has exited.

        Returns the error for the image's calls, or None if these are tried again.
        """
        left = self._left(batch)
        if not left:
            return None
        crash = Reason("crash").text
        return crash if signal == SIGKILL else self._refuse(batch, crash)

    def _refuse(self, batch: DecodeBatch, error: str) -> str:
        job = batch.works[0].job
        self._refused.add(job.tenant, job.digest, ImageError(_WORDS + error))
        return error

    def _settle(self, batch: DecodeBatch, error: str | None) -> None:
        """Complete all calls of a batch.

        error: the error, or None. It also ends queued calls for the same bytes.
        """
        works = batch.works
        if error is not None and works:
            name = works[0].job.name
            later = [work for work in self._waiting.values() if work.job.name == name]
            for work in later:
                self._leave(work)
            works = [*works, *later]
        for work in works:
            work.job.running = False
            if error is not None:
                fail(work.done, ImageError(_WORDS + error))
            elif not work.done.done():
                work.done.set_result(None)


class EarlyPixels(Protocol):
    """An image whose decode was started before the engine requested it."""

    async def write_to(self, target: memoryview, job: Job) -> bool:
        """Wait for the pixels of `job`, and write them to `target`. Return False if there are
        none.
        """
        ...


class Decoders:
    """Runs at most one decode per image key at a time, on a pool of image workers."""

    def __init__(self, pool: DecodePool, arena: Arena, metrics: Metrics) -> None:
        self.pool = pool
        self.early: dict[tuple[str, bytes], EarlyPixels] = {}
        """By the name of their jobs."""
        self._arena = arena
        self._metrics = metrics
        self._tasks: dict[ImageKey, asyncio.Task[None]] = {}

    async def decode(self, key: ImageKey, jobs: Sequence[Job], slot: PixelSlot) -> None:
        """Decode the jobs into `slot`, one below another.

        The slot is not written after the call has ended. Raises ImageError for bytes that cannot be
        decoded, EngineUnavailable if image workers fail to start, and CancelledError after
        `call_off`.
        """
        assert key not in self._tasks, "the engine asks for an image once at a time"
        task = asyncio.create_task(self._decode_all(jobs, slot.offset))
        self._tasks[key] = task
        try:
            await task
        finally:
            del self._tasks[key]
        self._metrics.inc("saccade_images_decoded_total")
        self._metrics.inc("saccade_image_bytes_shipped_total", slot.nbytes)

    async def _decode_all(self, jobs: Sequence[Job], offset: int) -> None:
        if len(jobs) == 1:
            (job,) = jobs
            target = self._arena.flat(offset, 3 * prod(job.recipe.canvas))
            early = self.early.get(job.name)
            if early is None or not await early.write_to(target, job):
                await self.pool.decode(job, offset)
            return
        works = []
        for job in jobs:
            works.append(asyncio.create_task(self.pool.decode(job, offset)))
            offset += 3 * prod(job.recipe.canvas)
        try:
            await asyncio.gather(*works)
        finally:
            # If one fails, the others must end before the slot can be reused.
            for work in works:
                work.cancel()
            await _all_ended(works)

    def call_off(self, key: ImageKey) -> None:
        """Cancel the image's decode if it is still running."""
        if key in self._tasks:
            self._tasks[key].cancel()

    async def close(self) -> None:
        """Stop the workers, then cancel all decodes."""
        await self.pool.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all_ended(works: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until cancelled tasks have ended, even if this call is cancelled meanwhile."""
    while not all(work.done() for work in works):
        try:
            await asyncio.wait(works)
        except asyncio.CancelledError:  # cancelled again
            continue
