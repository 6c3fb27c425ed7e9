"""The front end's side of image workers. Each worker has a slot, which sends it one order at a time
and receives its answers, or `WorkerLost` if the process exits.

The supervisor of the workers is forked by a fork server (`media/workers/fork_server.py`), and again
if it exits. A worker process reads bytes of one tenant only: before a slot is used for another
tenant, its worker is replaced and its memory is cleared. One worker is reserved for clients without
an order in flight, so that the slow orders of one client do not occupy all workers. It is forked at
its first use.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from signal import SIGKILL

from saccade.core.arena import Arena
from saccade.core.config import MIB
from saccade.core.errors import EngineUnavailable
from saccade.core.metrics import Metrics
from saccade.ipc.child import AsyncChannel, Disconnected
from saccade.media.workers.fork_server import ForkServer, SupervisorLink
from saccade.media.workers.orders import (
    FRONT,
    MAX_RETURNED,
    OUTBOX_SPARE,
    Answer,
    Decoded,
    DocumentPiece,
    Header,
    Kill,
    Lost,
    Order,
    ReplaceWorker,
    SupervisorOptions,
    WorkerReplaced,
    WorkersReady,
)

log = logging.getLogger("saccade")

Places = tuple[tuple[int, int], ...]
WorkerAnswer = Header | Decoded | DocumentPiece | WorkerReplaced

START_SECONDS = 120.0
"""How long a supervisor may take to start. This includes the fork server's import of torch, while
other processes of the server start at the same time.
"""
FAILED_STARTS = 2
"""After this many consecutive failed starts, waiting calls get an error."""
RESTART_SECONDS = 1.0
"""The pause after failed starts. A supervisor that was killed by a signal is restarted immediately.
"""
END_SECONDS = 5.0
"""How long the supervisor may take to stop its workers."""

TRIES = 2
"""How many workers an image may lose before it is rejected. A single loss may have another cause.
After a time-out in which the worker was computing, there is no second try.
"""
BLAME = 0.25
"""An image is rejected for a time-out only if its worker used at least this fraction of the time
limit as CPU time. Otherwise, the worker or the machine was suspended or busy.
"""
NO_TIME = "the image workers get no CPU time: try again"
SLACK_BYTES = 128 * MIB
"""Address space of a worker in addition to the needs of its images, for the allocator's
overhead.
"""

PAGE_BYTES = 4096
INLINE_BYTES = 1 << 20
"""Up to this many bytes are copied on the event loop, more on a thread."""
UNSETTLED = "\0"
"""Separates the probable tenant of bytes whose request has not been read completely from a number.
A worker of the probable tenant may read such bytes, since its results are used only once the tenant
is known. Until then it reads no other bytes.
"""
KEPT_INBOX_BYTES = 64 << 20
"""An inbox that grew larger than this is emptied after the order."""


class WorkerLost(Exception):
    """Raised if a worker exits before its order is done.

    signal: the signal that killed it, or 0.
    cpu: the CPU time since the order, or since the order's last answer, in seconds.
    late: True if it was killed for exceeding the CPU time limit.
    """

    def __init__(self, signal: int, cpu: float = 0.0, late: bool = False) -> None:
        super().__init__(f"signal {signal}")
        self.signal = signal
        self.cpu = cpu
        self.late = late


class WorkerSlot:
    """Sends orders to one worker, and receives the answers.

    A caller reserves the slot by setting `client`, the sender of the order. It then fills the
    memory file (inbox), sends one order, waits for the answers, and frees the slot.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.inbox = os.memfd_create("saccade-inbox", os.MFD_CLOEXEC)
        self.client: str | None = None  # whose order it has; None: idle
        # Whose bytes the worker or the inbox may contain. None if they are clean.
        self.tenant: str | None = None
        self.forked = True
        self.serial = self.life = self.turn = 0
        self._content: tuple[bytes, Places] = b"", ()
        """The inbox's current content: its name, if it has one, and (offset, bytes) of its
        parts.
        """
        self._answers: asyncio.Queue[WorkerAnswer | Lost] = asyncio.Queue()

    @property
    def busy(self) -> bool:
        return self.client is not None

    def begin_order(self, life: int) -> None:
        """Assign the next serial number. Answers to earlier orders are dropped.

        life: identifies the current supervisor.
        """
        self.serial += 1
        self.life = life
        self._answers = asyncio.Queue()

    def put_answer(self, answer: WorkerAnswer | Lost) -> None:
        """Queue an answer from this slot's worker, unless it answers an earlier order."""
        if answer.serial == self.serial:
            self._answers.put_nowait(answer)

    def lose(self, signal: int) -> None:
        """Report that the worker is lost, because the supervisor and its workers have exited."""
        self._answers.put_nowait(Lost(self.number, self.serial, signal))

    async def answer(self) -> WorkerAnswer:
        """Wait for the next answer to the order, and return it.

        Raises WorkerLost if the worker exits first.
        """
        answer = await self._answers.get()
        if isinstance(answer, Lost):
            raise WorkerLost(answer.signal, answer.cpu, answer.late)
        return answer

    async def fill(self, parts: Sequence[bytes], name: bytes = b"") -> Places:
        """Write encoded bytes into the inbox, unless it already contains those with this name.

        Returns (offset, number of bytes) of each part. Offsets are page-aligned.
        """
        if name and name == self._content[0]:
            return self._content[1]
        self._content = b"", ()
        places, end = [], 0
        for part in parts:
            places.append((end, len(part)))
            end += -(-len(part) // PAGE_BYTES) * PAGE_BYTES
        inbox = os.dup(self.inbox)  # the thread may outlive a cancelled call, so it gets its own fd
        if end <= INLINE_BYTES:
            _write(inbox, parts, places)
        else:
            await asyncio.to_thread(_write, inbox, parts, places)
        self._content = name, tuple(places)
        return self._content[1]

    async def answered(self, at: int, nbytes: int) -> bytes:
        """Return `nbytes` of a worker's result at offset `at` of the inbox."""
        inbox = os.dup(self.inbox)  # as in `fill`
        if nbytes <= INLINE_BYTES:
            return _take(inbox, at, nbytes)
        return await asyncio.to_thread(_take, inbox, at, nbytes)

    def free(self) -> None:
        """Make the slot available again, and release the memory of a large order."""
        self.client = None
        if os.fstat(self.inbox).st_size > KEPT_INBOX_BYTES:
            self.empty()

    def empty(self) -> None:
        """Release the inbox's memory, so that it contains only zeros."""
        self._content = b"", ()
        os.ftruncate(self.inbox, 0)

    def close(self) -> None:
        os.close(self.inbox)


class WorkerSlots:
    """Runs a supervisor, and has a slot for each of its workers."""

    def __init__(
        self,
        fork_server: ForkServer,
        arena: Arena | None,
        workers: int,
        memory: int,
        metrics: Metrics,
        changed: Callable[[], None],
        unusable: Callable[[str], None],
        outbox: int = 0,
    ) -> None:
        """Create `workers` slots that any client can use, and a reserved one, without starting a
        process.

        fork_server: may be shared, and is closed by the caller.
        arena: the memory for decoded pixels, or None for workers that read headers or documents.
        memory: the bytes by which a worker's address space may grow, even if its code is hostile.
        changed: called when the slots become usable.
        unusable: called with the reason if the workers repeatedly fail to start.
        outbox: the maximum bytes that a worker without an arena can return per order.
        """
        self._fork_server = fork_server
        self._arena = arena
        self._memory = memory
        self._outbox = outbox
        self._metrics = metrics
        self._changed = changed
        self._unusable = unusable
        self._slots = tuple(WorkerSlot(number) for number in range(workers + 1))
        self._reserved = self._slots[-1]
        self._channel: AsyncChannel[Order, Answer] | None = None
        self._life = self._turns = 0
        self._task: asyncio.Task[None] | None = None

    def idle(self, tenant: str = "") -> WorkerSlot | None:
        """Return an idle slot, or None if all are busy or the workers are not ready.

        Slots that `tenant` used last are preferred, then unused ones, then the least recently used.
        Check `has_worker` first.
        """
        readers = _readers_of(tenant)

        def cost(slot: WorkerSlot) -> tuple[bool, bool, bool, int]:
            reserved = slot is self._reserved
            return slot.tenant not in readers, reserved, slot.tenant is not None, slot.turn

        slots = self._slots if self._channel is not None else ()
        return min([slot for slot in slots if not slot.busy], key=cost, default=None)

    def has_worker(self, client: str) -> bool:
        """Return True if the client may use an idle slot.

        The last idle one is reserved for clients without an order in flight.
        """
        clients = [slot.client for slot in self._slots]
        idle = clients.count(None)
        return idle > 1 or (idle == 1 and client not in clients)

    def start(self) -> None:
        """Start the supervisor in the background on the running event loop, unless it was started
        before.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._keep_alive())

    async def close(self) -> None:
        """Stop the supervisor and its workers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for slot in self._slots:
            slot.close()

    async def prepare(
        self, slot: WorkerSlot, parts: Sequence[bytes], tenant: str, name: bytes = b""
    ) -> Places:
        """Prepare a slot for its next order, and fill its inbox with the tenant's bytes.

        The worker is replaced first if it has read another tenant's bytes. Returns (offset, number
        of bytes) of each part. Raises WorkerLost if the supervisor has exited, and
        EngineUnavailable if the system is out of memory or file descriptors.

        name: identifies parts that more than one order reads, to write them once.
        """
        slot.begin_order(self._life)
        self._turns += 1
        slot.turn = self._turns
        used = slot.tenant is not None and slot.tenant not in _readers_of(tenant)
        if used or not slot.forked:
            self.send(slot, ReplaceWorker(slot.number, slot.serial))
            assert isinstance(await slot.answer(), WorkerReplaced)
            slot.forked = True
        if used:
            slot.empty()
            self._metrics.inc("saccade_image_worker_renewals_total")
        slot.tenant = tenant
        try:
            return await slot.fill(parts, name)
        except OSError as error:
            raise EngineUnavailable(
                f"the file could not be sent to an image worker: {error.strerror}"
            ) from error

    def settle(self, unsettled: str, tenant: str) -> None:
        """Assign the workers and bytes of `unsettled` to `tenant`, once the tenant is known."""
        for slot in self._slots:
            if slot.tenant == unsettled:
                slot.tenant = tenant

    def send(self, slot: WorkerSlot, order: Order) -> None:
        """Send the order to the slot's worker. Raises WorkerLost if the supervisor has exited."""
        if self._channel is None or slot.life != self._life:
            raise WorkerLost(SIGKILL)
        self._channel.send(order)

    async def kill(self, slot: WorkerSlot) -> float:
        """Kill a slot's worker and wait until it has exited, so that it writes no more.

        Returns the CPU time since the order, or since the order's last answer, in seconds.
        """
        if slot.life != self._life:
            return 0.0
        if self._channel is not None:
            self._channel.send(Kill(slot.number, slot.serial))
        try:
            while True:
                await slot.answer()
        except WorkerLost as lost:
            return lost.cpu

    async def _keep_alive(self) -> None:
        failures = 0
        while True:
            begun = self._life
            status = await self._live()
            if self._life != begun:
                failures = 0
            elif status >= 0:
                failures += 1
                if failures >= FAILED_STARTS:
                    self._unusable(
                        f"the image workers failed to start (exit status {status}): see the "
                        "server's log"
                    )
                    await asyncio.sleep(RESTART_SECONDS)

    async def _live(self) -> int:
        """Run one supervisor until it and all its workers have exited, and return its exit
        status.
        """
        supervisor, begun = self._request(), self._life
        try:
            try:
                in_time = await self._talk(supervisor)
            except asyncio.CancelledError:
                if self._life != begun:  # it was ready, so there are workers to stop
                    with suppress(TimeoutError):
                        await asyncio.wait_for(supervisor.wait_closed(), END_SECONDS)
                raise
            if not in_time:
                self._fork_server.kill()
            await supervisor.wait_closed()
            if self._life != begun:
                self._metrics.inc("saccade_image_worker_restarts_total")
            for slot in self._slots:
                if slot.busy:
                    slot.lose(SIGKILL)
            return await supervisor.status() if in_time else 1
        finally:
            supervisor.close()

    def _request(self) -> SupervisorLink:
        inboxes = tuple(slot.inbox for slot in self._slots)
        if self._arena is None:
            wanted = SupervisorOptions(self._memory, outbox_bytes=self._outbox)
            return self._fork_server.fork(wanted, inboxes)
        nbytes = self._arena.size
        wanted = SupervisorOptions(self._memory, nbytes, nbytes + OUTBOX_SPARE + MAX_RETURNED)
        return self._fork_server.fork(wanted, (self._arena.fd, *inboxes))

    async def _talk(self, supervisor: SupervisorLink) -> bool:
        """Receive the supervisor's messages until it exits.

        Returns False if it did not become ready in time.
        """
        channel = await AsyncChannel.open(supervisor.socket, FRONT)
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = await channel.receive()
            self._report(ready)
            self._reserved.forked = False
            self._channel = channel
            self._life += 1
            self._changed()
            while True:
                self._receive_answer(await channel.receive())
        except Disconnected:
            return True
        except TimeoutError:
            return False
        finally:
            self._channel = None
            channel.close()

    def _report(self, ready: Answer) -> None:
        """Handle the first message of a supervisor. Log missing sandbox restrictions once."""
        assert isinstance(ready, WorkersReady)
        if ready.exposed and not self._life:
            log.warning(
                "image workers run without %s: a compromised decoder is less isolated",
                ", ".join(ready.exposed),
            )

    def _receive_answer(self, answer: Answer) -> None:
        assert not isinstance(answer, WorkersReady)
        if isinstance(answer, Lost):
            self._metrics.inc("saccade_image_worker_restarts_total")
        self._slots[answer.worker].put_answer(answer)


def _readers_of(tenant: str) -> tuple[str, str]:
    """Return the tenants whose workers may read the bytes of `tenant`.

    These are the tenant itself, and the probable tenant of bytes whose tenant is not known yet.
    """
    return tenant, tenant.partition(UNSETTLED)[0]


def _write(inbox: int, parts: Sequence[bytes], places: Sequence[tuple[int, int]]) -> None:
    try:
        for part, (offset, _) in zip(parts, places, strict=True):
            written = 0
            while written < len(part):
                written += os.pwrite(inbox, memoryview(part)[written:], offset + written)
    finally:
        os.close(inbox)


def _take(inbox: int, at: int, nbytes: int) -> bytes:
    try:
        return os.pread(inbox, nbytes, at)
    finally:
        os.close(inbox)
