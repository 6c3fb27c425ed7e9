"""Runs fork servers and supervisors, which fork image workers, and pass messages between the
workers and the front end.

`media/workers/fork_server.py` starts this module as a process. It is a fork server: it loads the
workers' libraries and forks supervisors, which fork the workers. So the libraries need not be
loaded again after a worker or a supervisor was killed. There are two fork servers. One is for
workers that read headers or documents, and starts quickly because it does not import torch. The
other is for workers that decode.

A supervisor forwards orders to workers, and the answers that match the order. It copies pixels from
a worker's outbox into the arena, and results of documents into the inbox. It kills a worker on
request, or if an order exceeds its CPU time. It replaces a worker that exited, within milliseconds.
The new worker cannot see data of the old one: the outbox is emptied, and an image's bytes are never
in the supervisor's own memory.

A supervisor never parses images and does not trust workers. The size of messages is limited, and it
never blocks to wait for the rest of a message. Encoded bytes are in memory files (inboxes), one per
worker, which the front end fills.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import mmap
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import prod
from typing import NoReturn

import numpy as np
import PIL.Image

from saccade.core.arena import Arena
from saccade.core.decoders import msgpack_decoder
from saccade.core.recipe import OwnPixels
from saccade.ipc.child import Channel, Disconnected, Frames, ParentLink, enter
from saccade.ipc.memory import begin_imports, end_imports, keep_freed
from saccade.media.formats import heif
from saccade.media.formats.pixel_operations import own_module
from saccade.media.reasons import READS_HEIC
from saccade.media.workers import thread_gate
from saccade.media.workers.orders import (
    EXIT_STATUS,
    FRONT,
    MAX_DESCRIPTORS,
    SUPERVISOR,
    TO_FRONT,
    Answer,
    Boot,
    Decode,
    Decoded,
    DocumentPiece,
    Header,
    Kill,
    Lost,
    Order,
    ReadDocument,
    ReadHeaders,
    ReplaceWorker,
    SupervisorOptions,
    Work,
    WorkerReplaced,
    WorkersReady,
)
from saccade.media.workers.sandbox import confine
from saccade.media.workers.thread_gate import ThreadGate
from saccade.media.workers.worker import Bytes, WorkerResources, serve

KEPT_BYTES = 64 << 20
"""Freed memory up to this size is kept for the next job, because zeroing new pages in the kernel
can take as long as decoding.
"""
MAX_SAID = 1 << 16
"""Maximum bytes of a worker's message."""
ORDER_SECONDS = 2.0
"""How long sending an order may block if the worker's socket buffer is full."""
SOON = 0.001
"""The minimum interval in seconds between two checks of a worker's CPU time."""

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
M_ARENA_MAX = -8


class Outbox:
    """Shared memory to which one worker writes its results.

    The supervisor resizes it for each order, because the worker has no file descriptor for it.
    """

    def __init__(self, nbytes: int) -> None:
        """Map the memory.

        nbytes: its maximum size.
        """
        self._file = os.memfd_create("saccade-outbox", os.MFD_CLOEXEC)
        os.ftruncate(self._file, nbytes)
        self._memory = mmap.mmap(self._file, nbytes)
        self._memory.madvise(mmap.MADV_DONTFORK)  # other workers must not inherit it
        os.ftruncate(self._file, 0)
        self._size = 0

    def empty(self) -> None:
        """Release the memory, so that it contains only zeros for the next worker."""
        os.ftruncate(self._file, 0)
        self._size = 0

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let a process that is forked inside this context inherit the memory."""
        self._memory.madvise(mmap.MADV_DOFORK)
        yield
        self._memory.madvise(mmap.MADV_DONTFORK)

    def make_room(self, nbytes: int) -> None:
        """Resize the memory for an order that needs `nbytes` bytes."""
        assert nbytes <= len(self._memory)
        if nbytes > self._size or self._size > KEPT_BYTES:
            os.ftruncate(self._file, nbytes)
            self._size = nbytes

    @property
    def pixels(self) -> Bytes:
        """The memory as bytes. Only memory that `make_room` has allocated may be accessed."""
        return np.frombuffer(self._memory, np.uint8)


@dataclass(slots=True, eq=False)
class ImageWorker:
    """The supervisor's record of one worker process."""

    number: int
    pid: int
    socket: socket.socket
    outbox: Outbox | None
    frames: Frames[Order, Answer]
    sends_gate: bool  # whether its next message is its thread gate
    gate: ThreadGate | None = None  # allows or denies its threads; `None` if it can start none
    ready: bool = False
    order: Work | None = None  # the last order
    answered: int = 0  # answers to that order so far
    cpu: float = 0.0  # the process's CPU time at the last message, in seconds
    strange: bool = False  # whether it was killed for an invalid message
    channel: Channel[Order, Answer] = field(init=False)

    def __post_init__(self) -> None:
        self.channel = Channel(self.socket, FRONT)

    @property
    def serial(self) -> int:
        return -1 if self.order is None else self.order.serial

    @property
    def left(self) -> float:
        """The CPU time that remains for the next answer, in seconds.

        It is infinite if no answer is due, or the order has no limit.
        """
        if self.order is None or self.answered == self.order.answers or self.order.cpu == math.inf:
            return math.inf
        return self.order.cpu - (cpu_seconds(self.pid) - self.cpu)

    def fits(self, answer: Answer) -> bool:
        """Return True if the answer is valid for the worker's current order."""
        if isinstance(answer, WorkersReady):
            return not self.ready
        if isinstance(answer, Lost | WorkerReplaced) or self.order is None:
            return False
        if (answer.worker, answer.serial) != (self.number, self.serial):
            return False
        if self.answered == self.order.answers or not (
            answer.reason is None or answer.reason.valid
        ):
            return False
        if isinstance(answer, Header):
            return isinstance(self.order, ReadHeaders) and answer.place == self.answered
        if isinstance(answer, DocumentPiece):
            if not isinstance(self.order, ReadDocument) or answer.place != self.answered:
                return False
            start, end = self.order.outbox[self.answered : self.answered + 2]
            return 0 <= answer.nbytes <= end - start
        return isinstance(self.order, Decode) and 0 <= answer.ms < math.inf


class Supervisor:
    """Forks and replaces workers, and passes messages between them and the front end."""

    def __init__(self, files: SupervisorFiles) -> None:
        self._files = files
        self._arena: Bytes | None = None
        if files.arena is not None:
            arena = Arena.attach(files.arena, files.wanted.arena_bytes)
            arena.keep_from_children()
            self._arena = arena.whole()
        front = socket.socket(fileno=files.front)
        self._front = Channel(front, SUPERVISOR)
        self._selector = selectors.DefaultSelector()
        self._selector.register(front, selectors.EVENT_READ, None)
        self._workers: dict[int, ImageWorker] = {}
        self._decodes_heic = READS_HEIC and self._arena is not None
        self._kind = b"decode" if self._arena is not None else b"header"
        if self._arena is None and files.wanted.outbox_bytes:
            self._kind = b"page"
        self._ready = False
        self._exposed: set[str] = set()

    def fork(self, number: int) -> None:
        """Fork a new worker for slot `number`."""
        outbox = None
        if number in self._workers:
            outbox = self._workers[number].outbox
        elif nbytes := self._files.wanted.outbox_bytes:
            outbox = Outbox(nbytes)
        if outbox is not None:
            outbox.empty()
        ours, theirs = socket.socketpair()
        supervisor = os.getpid()
        with contextlib.nullcontext() if outbox is None else outbox.lent():
            pid = os.fork()
        if not pid:
            self._run_worker(number, theirs, outbox, supervisor)
        theirs.close()
        ours.settimeout(ORDER_SECONDS)
        frames = Frames(FRONT, MAX_SAID)
        worker = ImageWorker(number, pid, ours, outbox, frames, self._decodes_heic)
        self._workers[number] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def run(self) -> None:
        """Pass messages until the front end disconnects, then kill all workers."""
        with contextlib.suppress(Disconnected):
            while True:
                events = self._selector.select(self._patience())
                # The front end first: once it has disconnected, no worker needs to have started.
                for key, _ in sorted(events, key=lambda event: event[0].data is not None):
                    if key.data is None:
                        self._pass_on(self._front.receive())
                    elif key.data is not self._workers[key.data.number]:
                        continue  # the worker was replaced by an earlier event
                    elif key.fileobj is key.data.gate:
                        self._begin_thread(key.data)
                    elif key.data.sends_gate:
                        self._receive_gate(key.data)
                    else:
                        self._receive_answer(key.data)
                for worker in [*self._workers.values()]:
                    if worker.left <= 0:
                        os.kill(worker.pid, signal.SIGKILL)
                        self._replace(worker, late=True)
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers.values():
            os.waitpid(worker.pid, 0)

    def _patience(self) -> float | None:
        """Return the minimum time until a worker can exceed its CPU time, in seconds.

        Returns None if no worker has a limit.
        """
        left = min(worker.left for worker in self._workers.values())
        return None if left == math.inf else max(SOON, left)

    def _pass_on(self, order: Order) -> None:
        if isinstance(order, ReplaceWorker):
            if used := self._workers.get(order.worker):
                os.kill(used.pid, signal.SIGKILL)
                self._reap(used)
            self.fork(order.worker)
            self._front.send(WorkerReplaced(order.worker, order.serial))
            return
        worker = self._workers[order.worker]
        if isinstance(order, Kill):
            if order.serial == worker.serial:
                os.kill(worker.pid, signal.SIGKILL)
            return
        worker.order, worker.answered, worker.cpu = order, 0, cpu_seconds(worker.pid)
        if worker.gate is not None:
            worker.gate.begin_order()
        if isinstance(order, Decode | ReadDocument) and worker.outbox is not None:
            worker.outbox.make_room(order.outbox[-1])
        try:
            worker.channel.send(order)
        except Disconnected:  # it has exited, or it does not read its socket
            os.kill(worker.pid, signal.SIGKILL)

    def _receive_gate(self, worker: ImageWorker) -> None:
        """Receive the thread gate of a new worker.

        If the worker has exited, the next event reports that.
        """
        worker.sends_gate = False
        worker.gate = thread_gate.receive_listener(worker.socket, worker.pid)
        if worker.gate is not None:
            self._selector.register(worker.gate, selectors.EVENT_READ, worker)

    def _receive_answer(self, worker: ImageWorker) -> None:
        """Receive the message of a worker.

        Kill the worker unless the message is a valid answer to its order.
        """
        try:
            data = worker.socket.recv(MAX_SAID, socket.MSG_DONTWAIT)
        except OSError:
            data = b""
        if not data:
            self._replace(worker)
            return
        try:
            answers = worker.frames.feed(data)
        except Exception:  # malformed bytes can raise any exception
            self._end(worker)
            return
        for answer in answers:
            if not worker.fits(answer):
                self._end(worker)
                return
            self._answer(worker, answer)

    def _begin_thread(self, worker: ImageWorker) -> None:
        most = worker.order.threads if isinstance(worker.order, Decode) else 0
        if worker.gate is not None and not worker.gate.answer(most):
            self._end(worker)

    def _end(self, worker: ImageWorker) -> None:
        """Kill and replace a worker that sent an invalid message, or tried to start too many
        threads.
        """
        worker.strange = True
        os.kill(worker.pid, signal.SIGKILL)
        self._replace(worker)

    def _answer(self, worker: ImageWorker, answer: Answer) -> None:
        if isinstance(answer, WorkersReady):
            worker.ready = True
            self._exposed.update(answer.exposed)
            if not self._ready and all(each.ready for each in self._workers.values()):
                self._ready = True
                self._front.send(WorkersReady(tuple(sorted(self._exposed))))
            return
        worker.answered += 1
        before, worker.cpu = worker.cpu, cpu_seconds(worker.pid)
        if isinstance(answer, Decoded) and answer.reason is None:
            self._deliver(worker)
        elif isinstance(answer, DocumentPiece):
            self._deliver_piece(worker, answer)
            answer = replace(answer, cpu=max(0.0, worker.cpu - before))
        self._front.send(answer)

    def _deliver(self, worker: ImageWorker) -> None:
        """Copy a worker's pixels into the arena, or into its inbox if the front end wants them."""
        assert isinstance(worker.order, Decode)
        assert worker.outbox is not None
        assert self._arena is not None
        made = worker.outbox.pixels
        for (offset, recipe), start in zip(worker.order.targets, worker.order.outbox):
            nbytes = 3 * prod(recipe.canvas)
            if offset == TO_FRONT:
                self._return(worker, worker.order, start, start + nbytes)
                continue
            self._arena[offset : offset + nbytes] = made[start : start + nbytes]

    def _deliver_piece(self, worker: ImageWorker, answer: DocumentPiece) -> None:
        """Copy one result of a document into the worker's inbox, where the front end reads it."""
        assert isinstance(worker.order, ReadDocument)
        start = worker.order.outbox[answer.place]
        self._return(worker, worker.order, start, start + answer.nbytes)

    def _return(
        self, worker: ImageWorker, order: Decode | ReadDocument, start: int, end: int
    ) -> None:
        """Copy bytes from a worker's outbox to its inbox.

        The data must not pass through the private memory of this process, because workers that are
        forked later inherit it. So the kernel copies it.
        """
        assert worker.outbox is not None
        inbox, offset = self._files.inboxes[worker.number], order.answer_at
        while start < end:
            piece = worker.outbox.pixels[start:end].data
            start += os.pwrite(inbox, piece, offset + start)

    def _replace(self, worker: ImageWorker, late: bool = False) -> None:
        """Replace a worker that has exited or was killed.

        late: True if it was killed for exceeding the CPU time of its order.
        """
        status, used = self._reap(worker)
        if os.WIFEXITED(status) and not worker.ready:
            raise RuntimeError("an image worker failed to start")
        self.fork(worker.number)
        if not self._ready:  # the front end has sent no orders yet, and waits for `WorkersReady`
            return
        fate = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        cpu = max(0.0, used - worker.cpu)
        fate = signal.SIGSYS if worker.strange else fate
        self._front.send(Lost(worker.number, worker.serial, fate, cpu, late))

    def _reap(self, worker: ImageWorker) -> tuple[int, float]:
        """Wait until a worker has exited, and release its resources.

        Returns its wait status and its CPU time in seconds.
        """
        self._selector.unregister(worker.socket)
        worker.channel.close()
        if worker.gate is not None:
            self._selector.unregister(worker.gate)
            worker.gate.close()
        _, status, used = os.wait4(worker.pid, 0)
        return status, used.ru_utime + used.ru_stime

    def _run_worker(
        self, number: int, connection: socket.socket, outbox: Outbox | None, supervisor: int
    ) -> NoReturn:
        """Run a worker in this newly forked process. Does not return."""
        status = 1
        try:
            if follows(supervisor, b"saccade-" + self._kind):
                # Read-only, so that a worker cannot change the data of later orders.
                source = f"/proc/self/fd/{self._files.inboxes[number]}"
                inbox = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
                statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
                memory = np.empty(0, np.uint8) if outbox is None else outbox.pixels
                keep = (connection.fileno(), inbox, statm, self._files.lifeline)
                threads = self._decodes_heic and thread_gate.send_listener_fd(connection)
                exposed = confine(keep, self._files.wanted.memory, threads)
                channel: Channel[Answer, Order] = Channel(connection, SUPERVISOR)
                channel.send(WorkersReady(tuple(exposed)))
                serve(channel, WorkerResources(inbox, memory, statm, threads))
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a child process in seconds, or 0 if it has exited."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock id that clock_getcpuclockid(3) returns
    except OSError:
        return 0.0  # it has exited


def follows(parent: int, name: bytes) -> bool:
    """Set the name of this newly forked process, and let the kernel kill it when `parent` exits.

    Returns False if the parent has already exited.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, name)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


@dataclass(frozen=True, slots=True)
class SupervisorFiles:
    """The options of a supervisor, and the file descriptors that were sent with them."""

    wanted: SupervisorOptions
    front: int  # socket to the front end
    lifeline: int  # write end of the pipe that is closed when all processes have exited
    arena: int | None
    inboxes: tuple[int, ...]  # one per worker

    @classmethod
    def unpack(
        cls, wanted: SupervisorOptions, descriptors: list[int]
    ) -> tuple[SupervisorFiles, int]:
        """Assign the descriptors to fields. Return these and the pipe for the exit status."""
        front, lifeline, report, *others = descriptors
        arena = others.pop(0) if wanted.arena_bytes else None
        return cls(wanted, front, lifeline, arena, tuple(others)), report

    def close(self) -> None:
        for descriptor in (self.front, self.lifeline, self.arena, *self.inboxes):
            if descriptor is not None:
                os.close(descriptor)


def fork_server(link: ParentLink) -> int:
    """Fork a supervisor for each request from the front end, and report its status when it exits.

    The status is negative for a signal. Returns the exit status of this process, 0, once the front
    end has exited.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    reports: dict[int, int] = {}  # pid of a supervisor: the pipe for its exit status
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(woken, selectors.EVENT_READ)
    selector.register(link.socket, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == woken:
                os.read(woken, MAX_SAID)
                reap(reports)
                continue
            message, descriptors, _, _ = socket.recv_fds(link.socket, MAX_SAID, MAX_DESCRIPTORS)
            if not message:
                return 0
            wanted = msgpack_decoder(SupervisorOptions).decode(message)
            files, report = SupervisorFiles.unpack(wanted, descriptors)
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                link.socket.close()
                for descriptor in (woken, wake, report, *reports.values()):
                    os.close(descriptor)
                be_supervisor(files, parent)
            files.close()
            reports[pid] = report


def reap(reports: dict[int, int]) -> None:
    """Reap all children that have exited, and report the status of those that are supervisors.

    The others are workers whose supervisor was killed.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid in reports:
                report = reports.pop(pid)
                with contextlib.suppress(BrokenPipeError):  # the front end no longer waits for it
                    os.write(report, EXIT_STATUS.pack(os.waitstatus_to_exitcode(status)))
                os.close(report)


def be_supervisor(files: SupervisorFiles, parent: int) -> NoReturn:
    """Run a supervisor in this newly forked process. Does not return."""
    status = 1
    try:
        if follows(parent, b"saccade-nursery"):
            supervisor = Supervisor(files)
            for number in range(len(files.inboxes) - 1):  # the last is forked when it is needed
                supervisor.fork(number)
            supervisor.run()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> int:
    # Imported here so that importing this module does not load image parsers.
    from PIL import AvifImagePlugin

    boot, link = enter(Boot)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, b"saccade-images")
    keep_freed(KEPT_BYTES)
    libc.mallopt(M_ARENA_MAX, 1)  # each further arena would take 64 MiB of address space
    PIL.Image.MAX_IMAGE_PIXELS = None  # Saccade checks its own limit
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # workers cannot start threads
    begin_imports()
    warm_up(boot.decodes, boot.own)
    end_imports()  # keep the garbage collector from writing to pages that forks share
    return fork_server(link)


def warm_up(decode: bool, own: OwnPixels | None) -> None:
    """Load everything that workers need, because they cannot open files.

    This takes one or two seconds for workers that decode.

    own: the model family's preprocessing operation, or None.
    """
    from saccade.media.formats.decode import FORMATS
    from saccade.media.formats.header import probe

    images = [heif.SAMPLE] if READS_HEIC else []
    plain = [("RGB", kind) for kind in set(FORMATS) - set(heif.FORMATS)]
    # L*a*b* makes Pillow load its color management
    for mode, kind in [*plain, ("LAB", "TIFF")]:
        encoded = io.BytesIO()
        PIL.Image.new(mode, (64, 64)).save(encoded, kind)
        images.append(encoded.getvalue())
    for image in images:
        probe(image, 64 * 64)
    if find_spec("av") is not None:
        from saccade.media.formats import container

        container.warm_up()
    if not decode:
        if find_spec("pypdfium2_raw") is not None:
            from saccade.media.formats import pdf

            pdf.warm_up()
        return
    from saccade.core.recipe import whole
    from saccade.media.formats.decode import decode_into

    for image in images:
        canvas = np.empty((32, 32, 3), np.uint8)
        decode_into([(canvas, whole((32, 32)))], memoryview(image), (64, 64), 1)
    if own is not None:
        own_module(own).warm_up(own.argument)


if __name__ == "__main__":
    sys.exit(main())
