"""The decode workers as the front sees them: a queue of jobs, processes that come and go, answers.

Owns the processes and their queue. Each worker has one job at a time. One that crashes or overruns
its time is killed and replaced; its job is tried once more on another process, then fails with an
ImageError. Knows nothing of keys; memory it writes to was reserved by the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field

from saccade.core.arena import Arena
from saccade.core.errors import EngineUnavailable, ImageError
from saccade.core.metrics import Metrics
from saccade.media import decode_worker
from saccade.media.content import Probe

START_TIMEOUT = 120.0
"""Seconds a worker may take to import torch, on a machine where everything else starts at the same
time.
"""

ATTEMPTS = 2
"""Tries per job that ends its worker: the second one, on a fresh process, tells a bad picture from
bad luck.
"""

RESTART_PAUSE = 1.0
"""Seconds between tries once workers keep failing to start."""

INLINE_BYTES = 1 << 20
"""Bytes that are copied on the event loop; more go through a thread."""

_numbers = itertools.count()


class WorkerLost(Exception):
    """A worker died or had to be killed; the message says how, as the end of a sentence about the
    picture.
    """


class StartFailed(Exception):
    """A worker ended before it was ready."""


@dataclass(slots=True, eq=False)
class Job:
    """One picture to decode: `size` is its (height, width) in the arena. Urgent ones go first,
    older ones before newer.

    `ms` is how long it took, once it is done.
    """

    data: bytes
    probe: Probe
    size: tuple[int, int]
    urgent: bool
    number: int = field(default_factory=lambda: next(_numbers))
    running: bool = False
    attempts: int = 0
    ms: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.size[0] * self.size[1] * 3

    @property
    def turn(self) -> tuple[bool, int]:
        """Sorts jobs into the order they are served in."""
        return not self.urgent, self.number


class DecodePool:
    """`workers` decode processes over one arena."""

    def __init__(self, arena: Arena, workers: int, timeout: float, metrics: Metrics) -> None:
        self._arena = arena
        self._workers = workers
        self._timeout = timeout
        self._metrics = metrics
        self._queue: dict[Job, tuple[int, asyncio.Future[None]]] = {}
        self._arrived = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the workers in the background, on the running loop; jobs wait for the first that is
        ready.
        """
        self._tasks = [asyncio.create_task(self._keep_working()) for _ in range(self._workers)]

    async def decode(self, job: Job, offset: int) -> None:
        """Decode `job` to `offset` in the arena. Raises ImageError when it cannot be done,
        EngineUnavailable when no worker starts.

        May be cancelled while the job waits; once `job.running`, only `close` may end it, for its
        worker writes to the arena.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[job] = (offset, done)
        self._arrived.release()
        try:
            await done
        finally:
            del self._queue[job]

    async def close(self) -> None:
        """Kill the workers and cancel what still waits for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, done in self._queue.values():
            done.cancel()

    async def _keep_working(self) -> None:
        """One worker's place: a process, and when that is lost, another."""
        failures = 0
        while True:
            try:
                async with _Process(self._arena) as process:
                    failures = 0
                    while True:
                        await self._serve(process, await self._next())
            except WorkerLost:
                self._metrics.inc("saccade_decode_worker_restarts_total")
            except StartFailed as error:
                failures += 1
                if failures >= ATTEMPTS:
                    self._fail_waiting(str(error))
                    await asyncio.sleep(RESTART_PAUSE)

    async def _next(self) -> Job:
        while True:
            await self._arrived.acquire()
            waiting = [
                job for job, (_, done) in self._queue.items() if not (job.running or done.done())
            ]
            if waiting:
                job = min(waiting, key=lambda job: job.turn)
                job.running = True
                return job

    async def _serve(self, process: _Process, job: Job) -> None:
        """Have `process` do `job`.

        Raises WorkerLost after a crash or an overrun; the job then waits for its second try or has
        failed.
        """
        offset, done = self._queue[job]
        try:
            answer = await asyncio.wait_for(process.run(job, offset), self._timeout)
        except (TimeoutError, WorkerLost) as lost:
            await process.kill()  # before anyone else may use that part of the arena
            job.attempts += 1
            job.running = False
            if job.attempts < ATTEMPTS:
                self._arrived.release()
            elif not done.done():
                why = (
                    f"decoding it takes longer than {self._timeout:g} s"
                    if isinstance(lost, TimeoutError)
                    else str(lost)
                )
                done.set_exception(ImageError(f"the picture cannot be decoded: {why}"))
            raise WorkerLost from lost
        if done.done():
            return
        job.ms = answer.ms
        if answer.error is None:
            done.set_result(None)
        else:
            done.set_exception(ImageError(f"the picture cannot be decoded: {answer.error}"))

    def _fail_waiting(self, why: str) -> None:
        for job, (_, done) in self._queue.items():
            if not job.running and not done.done():
                done.set_exception(EngineUnavailable(why))


class _Process:
    """One worker process: `async with` waits until it is ready, and kills it at the end."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    async def __aenter__(self) -> _Process:
        ours, theirs = socket.socketpair()
        self._inbox = os.memfd_create("saccade-inbox", os.MFD_CLOEXEC)
        descriptors = (theirs.fileno(), self._arena.fd, self._inbox)
        arguments = (descriptors[0], descriptors[1], self._arena.size, descriptors[2], os.getpid())
        command = [sys.executable, "-m", decode_worker.__name__, *map(str, arguments)]
        with theirs:
            # The worker asks to die with the thread that starts it, which is the event loop's.
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            await asyncio.wait_for(self._answer(), START_TIMEOUT)
        except (TimeoutError, WorkerLost) as error:
            await self.kill()
            raise StartFailed(
                f"the decode workers do not start (exit status {self._child.returncode}): see "
                "the server's log"
            ) from error
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def run(self, job: Job, offset: int) -> decode_worker.Answer:
        """Do one job. Raises WorkerLost."""
        inbox = os.dup(self._inbox)  # a copy for the thread alone: it may outlive a cancelled call
        if len(job.data) <= INLINE_BYTES:
            _fill(inbox, job.data)
        else:
            await asyncio.to_thread(_fill, inbox, job.data)
        order = decode_worker.Job(
            len(job.data), job.probe.upright, job.probe.orientation, offset, job.size
        )
        self._writer.write(decode_worker.encode(order))
        return await self._answer()

    async def _answer(self) -> decode_worker.Answer:
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        if not line:
            raise WorkerLost("its decoder crashed")
        return decode_worker.Answer(**json.loads(line))

    async def kill(self) -> None:
        """End the process and wait until it has gone. Calling it again does nothing."""
        if self._child.poll() is None:
            self._child.kill()
            await asyncio.to_thread(self._child.wait)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        if self._inbox >= 0:
            os.close(self._inbox)
            self._inbox = -1


def _fill(inbox: int, data: bytes) -> None:
    """Write the file from its start, and close it."""
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(inbox, memoryview(data)[written:], written)
    finally:
        os.close(inbox)
