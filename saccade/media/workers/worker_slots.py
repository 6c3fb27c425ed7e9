"""Image workers as processes. Each has a slot, takes one order at a time, and the slot hears of its
end, even if the process dies.

Has a fork server (`media/workers/fork_server.py`) fork a supervisor, and a new supervisor after its
end. A worker reads one tenant's bytes: before another's come, it has ended, and its memory is
empty.
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
"""How long a supervisor may take to be ready, its fork server's import of torch included, on a
machine where everything else starts at the same time.
"""
FAILED_STARTS = 2
"""Starts in a row that end by themselves before those who wait are told."""
RESTART_SECONDS = 1.0
"""Between supervisors that end by themselves. What was killed from outside is started at once."""
END_SECONDS = 5.0
"""How long the supervisor may take to end its workers."""

TRIES = 2
"""Tries per image that loses its worker: the second tells a bad image from bad luck. There is none
after a time-out in which the worker has computed.
"""
BLAME = 0.25
"""Share of a time limit that a worker must have computed for its image to bear the blame. Else the
worker was stopped, or the machine was: what time has passed says nothing of an image.
"""
NO_TIME = "the image workers get no CPU time: try again"
SLACK_BYTES = 128 * MIB
"""Address space of a worker beside the price of its images, for what the allocator rounds up."""

PAGE_BYTES = 4096
INLINE_BYTES = 1 << 20
"""Bytes that are copied on the event loop; more go through a thread."""
UNSETTLED = "\0"
"""Follows the probable tenant of bytes whose request is not read yet, and precedes its number. A
worker of the probable tenant may read them, as what it says of them counts only once the tenant is
certain. Until then it reads no other's bytes.
"""
KEPT_INBOX_BYTES = 64 << 20
"""A memory file that had to hold more is emptied afterwards."""


class WorkerLost(Exception):
    """A worker ended before its order was done. `signal` is the killing signal, or 0. `cpu` is the
    seconds of CPU time taken by the order, or by its rest. `late` means that this was more
    than allowed.
    """

    def __init__(self, signal: int, cpu: float = 0.0, late: bool = False) -> None:
        super().__init__(f"signal {signal}")
        self.signal = signal
        self.cpu = cpu
        self.late = late


class WorkerSlot:
    """One worker's slot. The user takes the slot (`busy`), fills the memory file, sends one order,
    and reads answers. `tenant` is whose bytes the worker or the file may have, or `None` if they
    are clean.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.inbox = os.memfd_create("saccade-inbox", os.MFD_CLOEXEC)
        self.busy = False
        self.tenant: str | None = None
        self.serial = self.life = self.turn = 0
        self._content: tuple[bytes, Places] = b"", ()
        """Name and places of the file's parts, if they have a name."""
        self._answers: asyncio.Queue[WorkerAnswer | Lost] = asyncio.Queue()

    def begin_order(self, life: int) -> None:
        """Number the next order, to the supervisor of `life`. Answers to earlier orders are
        void.
        """
        self.serial += 1
        self.life = life
        self._answers = asyncio.Queue()

    def put_answer(self, answer: WorkerAnswer | Lost) -> None:
        """Take an answer of this slot's worker. Answers to earlier orders are dropped."""
        if answer.serial == self.serial:
            self._answers.put_nowait(answer)

    def lose(self, signal: int) -> None:
        """Record that the supervisor has ended, and this slot's worker too."""
        self._answers.put_nowait(Lost(self.number, self.serial, signal))

    async def answer(self) -> WorkerAnswer:
        """Wait for the next answer to the order. Raises WorkerLost."""
        answer = await self._answers.get()
        if isinstance(answer, Lost):
            raise WorkerLost(answer.signal, answer.cpu, answer.late)
        return answer

    async def fill(self, parts: Sequence[bytes], name: bytes = b"") -> Places:
        """Write encoded bytes into the memory file, unless they are there under the same name.
        Returns (offset, bytes) of each part.
        """
        if name and name == self._content[0]:
            return self._content[1]
        self._content = b"", ()
        places, end = [], 0
        for part in parts:
            places.append((end, len(part)))
            end += -(-len(part) // PAGE_BYTES) * PAGE_BYTES
        inbox = os.dup(self.inbox)  # a copy for the thread alone: it may outlive a cancelled call
        if end <= INLINE_BYTES:
            _write(inbox, parts, places)
        else:
            await asyncio.to_thread(_write, inbox, parts, places)
        self._content = name, tuple(places)
        return self._content[1]

    async def answered(self, at: int, nbytes: int) -> bytes:
        """Read a worker's answer, from byte `at` of the memory file on."""
        inbox = os.dup(self.inbox)  # as `fill`
        if nbytes <= INLINE_BYTES:
            return _take(inbox, at, nbytes)
        return await asyncio.to_thread(_take, inbox, at, nbytes)

    def free(self) -> None:
        """Take the slot out of use, and release the memory of a large order."""
        self.busy = False
        if os.fstat(self.inbox).st_size > KEPT_INBOX_BYTES:
            self.empty()

    def empty(self) -> None:
        """Release the memory, so that the next bytes are surrounded by zeros."""
        self._content = b"", ()
        os.ftruncate(self.inbox, 0)

    def close(self) -> None:
        os.close(self.inbox)


class WorkerSlots:
    """A supervisor, and a slot for each worker. Workers decode into `arena`, or without an arena
    read headers or documents. `memory` is the bytes that hostile code in one worker may take. A
    fork server may be shared, and its maker ends it.

    `changed` is called when slots become usable. `unusable` is called with the reason if they stay
    unusable.
    """

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
        """Set up the slots. A worker without an arena may answer with `outbox` bytes."""
        self._fork_server = fork_server
        self._arena = arena
        self._memory = memory
        self._outbox = outbox
        self._metrics = metrics
        self._changed = changed
        self._unusable = unusable
        self._slots = tuple(WorkerSlot(number) for number in range(workers))
        self._channel: AsyncChannel[Order, Answer] | None = None
        self._life = self._turns = 0
        self._task: asyncio.Task[None] | None = None

    def idle(self, tenant: str = "") -> WorkerSlot | None:
        """Return an idle slot, `tenant`'s own or a fresh one if any, else the least recently used.
        Returns `None` if all are busy, and while workers take no orders.
        """
        own = tenant, tenant.partition(UNSETTLED)[0]

        def cost(slot: WorkerSlot) -> tuple[bool, bool, int]:
            return slot.tenant not in own, slot.tenant is not None, slot.turn

        slots = self._slots if self._channel is not None else ()
        return min([slot for slot in slots if not slot.busy], key=cost, default=None)

    @property
    def num_idle(self) -> int:
        """Count the idle slots."""
        return sum(not slot.busy for slot in self._slots)

    def start(self) -> None:
        """Start the supervisor in the background, on the running loop, unless started."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_alive())

    async def close(self) -> None:
        """End the supervisor and its workers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for slot in self._slots:
            slot.close()

    async def prepare(
        self, slot: WorkerSlot, parts: Sequence[bytes], tenant: str, name: bytes = b""
    ) -> Places:
        """Number a worker slot's next order and fill its memory file with the tenant's bytes.
        Returns (offset, bytes) of each part.

        `name` is for parts that several orders read. Raises WorkerLost after the supervisor's end,
        and EngineUnavailable if the system has no memory or no descriptor for the bytes.
        """
        slot.begin_order(self._life)
        self._turns += 1
        slot.turn = self._turns
        if slot.tenant not in (None, tenant, tenant.partition(UNSETTLED)[0]):
            self.send(slot, ReplaceWorker(slot.number, slot.serial))
            assert isinstance(await slot.answer(), WorkerReplaced)
            slot.empty()
            self._metrics.inc("saccade_image_worker_renewals_total")
        slot.tenant = tenant
        try:
            return await slot.fill(parts, name)
        except OSError as error:
            raise EngineUnavailable(
                f"it could not be sent to an image worker: {error.strerror}"
            ) from error

    def settle(self, unsettled: str, tenant: str) -> None:
        """Take the bytes of an unsettled tenant for `tenant`'s."""
        for slot in self._slots:
            if slot.tenant == unsettled:
                slot.tenant = tenant

    def send(self, slot: WorkerSlot, order: Order) -> None:
        """Give the prepared order to its worker. Raises WorkerLost after the supervisor's end."""
        if self._channel is None or slot.life != self._life:
            raise WorkerLost(SIGKILL)
        self._channel.send(order)

    async def kill(self, slot: WorkerSlot) -> float:
        """End the worker of a slot's order, and wait until its writes have ended. Returns the
        seconds of CPU time taken by the order, or by its rest.
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
        """Run one supervisor from its start to the end of its last worker. Returns its exit
        status.
        """
        supervisor, begun = self._ask(), self._life
        try:
            try:
                in_time = await self._talk(supervisor)
            except asyncio.CancelledError:
                if self._life != begun:  # there are workers to end
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

    def _ask(self) -> SupervisorLink:
        inboxes = tuple(slot.inbox for slot in self._slots)
        if self._arena is None:
            wanted = SupervisorOptions(self._memory, outbox_bytes=self._outbox)
            return self._fork_server.fork(wanted, inboxes)
        nbytes = self._arena.size
        wanted = SupervisorOptions(self._memory, nbytes, nbytes + OUTBOX_SPARE + MAX_RETURNED)
        return self._fork_server.fork(wanted, (self._arena.fd, *inboxes))

    async def _talk(self, supervisor: SupervisorLink) -> bool:
        """Wait until the supervisor has exited. Returns True if it was ready in time."""
        channel = await AsyncChannel.open(supervisor.socket, FRONT)
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = await channel.receive()
            self._tell(ready)
            self._channel = channel
            self._life += 1
            self._changed()
            while True:
                self._hear(await channel.receive())
        except Disconnected:
            return True
        except TimeoutError:
            return False
        finally:
            self._channel = None
            channel.close()

    def _tell(self, ready: Answer) -> None:
        """Take a supervisor's first message, and warn of exposed rights once."""
        assert isinstance(ready, WorkersReady)
        if ready.exposed and not self._life:
            log.warning(
                "image workers run without %s: a compromised decoder is less isolated",
                ", ".join(ready.exposed),
            )

    def _hear(self, answer: Answer) -> None:
        assert not isinstance(answer, WorkersReady)
        if isinstance(answer, Lost):
            self._metrics.inc("saccade_image_worker_restarts_total")
        self._slots[answer.worker].put_answer(answer)


def _write(inbox: int, parts: Sequence[bytes], places: Sequence[tuple[int, int]]) -> None:
    """Write each part at its place, and close the file."""
    try:
        for part, (offset, _) in zip(parts, places, strict=True):
            written = 0
            while written < len(part):
                written += os.pwrite(inbox, memoryview(part)[written:], offset + written)
    finally:
        os.close(inbox)


def _take(inbox: int, at: int, nbytes: int) -> bytes:
    """Read a part, and close the file."""
    try:
        return os.pread(inbox, nbytes, at)
    finally:
        os.close(inbox)
