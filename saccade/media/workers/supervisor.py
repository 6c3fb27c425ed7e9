"""Supervisors: processes that fork image workers, and pass messages between workers and the front.

Started by `media/workers/fork_server.py` as `python -m saccade.media.workers.supervisor`. The
process, a fork server, loads the workers' libraries and forks supervisors, which fork the workers.
Fork servers are two. One is for workers that read headers or documents, without torch and ready in
a moment. The other is for workers that decode.

A supervisor passes orders on, and answers that fit the order. It copies pixels from a worker's
outbox into the arena, and a document's pieces behind the document. It kills a worker on request, or
when an order takes too much CPU time, and replaces an ended worker in milliseconds. A
successor cannot see its predecessor's data: its memory is empty, and the supervisor's own
memory has never held an image's bytes. A supervisor never looks at an image, and believes no
worker. Messages are bounded, and the rest of a message is never waited for.

A fork server only forks supervisors and reports their exit status, so that modules are not
loaded again after a kill. Encoded bytes are in memory files, one per worker, that the front fills.
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
"""Freed memory that is kept for the next job: having the kernel clear it again can cost as much as
decoding.
"""
MAX_SAID = 1 << 16
"""Bytes of a worker's answer."""
ORDER_SECONDS = 2.0
"""How long a worker may take to take an order that its socket has no room for."""
SOON = 0.001
"""Seconds after which a worker's processor time is looked at again, at least."""

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
M_ARENA_MAX = -8


class Outbox:
    """Memory that one worker writes its pixels to. It has as many bytes as the order needs, for the
    worker has no descriptor to enlarge it.
    """

    def __init__(self, nbytes: int) -> None:
        """Map the memory. `nbytes` is the most that it is ever to have."""
        self._file = os.memfd_create("saccade-outbox", os.MFD_CLOEXEC)
        os.ftruncate(self._file, nbytes)
        self._memory = mmap.mmap(self._file, nbytes)
        self._memory.madvise(mmap.MADV_DONTFORK)  # no other worker's
        os.ftruncate(self._file, 0)
        self._size = 0

    def empty(self) -> None:
        """Give the memory back, so that what is lent next begins as zeros."""
        os.ftruncate(self._file, 0)
        self._size = 0

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give the memory to a process forked inside."""
        self._memory.madvise(mmap.MADV_DOFORK)
        yield
        self._memory.madvise(mmap.MADV_DONTFORK)

    def make_room(self, nbytes: int) -> None:
        """Make the memory large enough for an order."""
        assert nbytes <= len(self._memory)
        if nbytes > self._size or self._size > KEPT_BYTES:
            os.ftruncate(self._file, nbytes)
            self._size = nbytes

    @property
    def pixels(self) -> Bytes:
        """Return all of the memory. An order's need has been made."""
        return np.frombuffer(self._memory, np.uint8)


@dataclass(slots=True, eq=False)
class ImageWorker:
    """A forked process as the supervisor sees it. `order` is the last, and `answered` counts its
    answers. `cpu` is the CPU time taken at the last message. `gate` is asked for threads, and
    `None` means no threads.
    """

    number: int
    pid: int
    socket: socket.socket
    outbox: Outbox | None
    frames: Frames[Order, Answer]
    gate: ThreadGate | None
    ready: bool = False
    order: Work | None = None
    answered: int = 0
    cpu: float = 0.0
    strange: bool = False
    channel: Channel[Order, Answer] = field(init=False)

    def __post_init__(self) -> None:
        self.channel = Channel(self.socket, FRONT)

    @property
    def serial(self) -> int:
        return -1 if self.order is None else self.order.serial

    @property
    def left(self) -> float:
        """Return the seconds of CPU time left for the next answer. They are infinite while
        none is due.
        """
        if self.order is None or self.answered == self.order.answers or self.order.cpu == math.inf:
            return math.inf
        return self.order.cpu - (cpu_seconds(self.pid) - self.cpu)

    def fits(self, answer: Answer) -> bool:
        """Return True if the worker may send this answer now."""
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
    """Forks workers, and passes messages between them and the front."""

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
        self._decodes_heic = heif.INSTALLED and self._arena is not None
        self._kind = b"decode" if self._arena is not None else b"header"
        if self._arena is None and files.wanted.outbox_bytes:
            self._kind = b"page"
        self._ready = False
        self._exposed: set[str] = set()

    def fork(self, number: int) -> None:
        """Put a new worker into a slot."""
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
            self._be_worker(number, theirs, outbox, supervisor)
        theirs.close()
        ours.settimeout(ORDER_SECONDS)
        gate = thread_gate.receive_listener(ours, pid) if self._decodes_heic else None
        worker = ImageWorker(number, pid, ours, outbox, Frames(FRONT, MAX_SAID), gate)
        self._workers[number] = worker
        if gate is not None:
            self._selector.register(gate, selectors.EVENT_READ, worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def run(self) -> None:
        """Pass messages until the front has exited, then end every worker."""
        with contextlib.suppress(Disconnected):
            while True:
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        self._pass_on(self._front.receive())
                    elif key.data is not self._workers[key.data.number]:
                        continue  # it was replaced a moment ago
                    elif key.fileobj is key.data.gate:
                        self._begin_thread(key.data)
                    else:
                        self._hear(key.data)
                for worker in [*self._workers.values()]:
                    if worker.left <= 0:
                        os.kill(worker.pid, signal.SIGKILL)
                        self._replace(worker, late=True)
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers.values():
            os.waitpid(worker.pid, 0)

    def _patience(self) -> float | None:
        """Return the seconds until some worker may have used up its CPU time, or `None` if
        all may run on.
        """
        left = min(worker.left for worker in self._workers.values())
        return None if left == math.inf else max(SOON, left)

    def _pass_on(self, order: Order) -> None:
        if isinstance(order, ReplaceWorker):
            if used := self._workers.get(order.worker):
                os.kill(used.pid, signal.SIGKILL)
                self._bury(used)
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
        except Disconnected:  # it has exited, which its socket will report, or it does not listen
            os.kill(worker.pid, signal.SIGKILL)

    def _hear(self, worker: ImageWorker) -> None:
        """Take a worker's message. It must answer the worker's own order, or the worker ends."""
        try:
            data = worker.socket.recv(MAX_SAID, socket.MSG_DONTWAIT)
        except OSError:
            data = b""
        if not data:
            self._replace(worker)
            return
        try:
            answers = worker.frames.feed(data)
        except Exception:  # decoders raise what they please on malformed bytes
            self._end(worker)
            return
        for answer in answers:
            if not worker.fits(answer):
                self._end(worker)
                return
            self._answer(worker, answer)

    def _begin_thread(self, worker: ImageWorker) -> None:
        """Answer a worker that would begin a thread."""
        most = worker.order.threads if isinstance(worker.order, Decode) else 0
        if worker.gate is not None and not worker.gate.answer(most):
            self._end(worker)

    def _end(self, worker: ImageWorker) -> None:
        """End a worker that breaks the rules of messages."""
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
        """Copy a worker's pixels into the arena, or to the front's memory."""
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
        """Copy a worker's piece to the front's memory."""
        assert isinstance(worker.order, ReadDocument)
        start = worker.order.outbox[answer.place]
        self._return(worker, worker.order, start, start + answer.nbytes)

    def _return(
        self, worker: ImageWorker, order: Decode | ReadDocument, start: int, end: int
    ) -> None:
        """Copy from a worker's outbox to the front's memory, by the kernel. A worker forked later
        would see all that was in this process's own memory.
        """
        assert worker.outbox is not None
        inbox, offset = self._files.inboxes[worker.number], order.answer_at
        while start < end:
            piece = worker.outbox.pixels[start:end].data
            start += os.pwrite(inbox, piece, offset + start)

    def _replace(self, worker: ImageWorker, late: bool = False) -> None:
        """Replace a worker that has ended, or was killed. If `late`, it was killed for its order's
        CPU time.
        """
        status, used = self._bury(worker)
        self.fork(worker.number)
        fate = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        cpu = max(0.0, used - worker.cpu)
        fate = signal.SIGSYS if worker.strange else fate
        self._front.send(Lost(worker.number, worker.serial, fate, cpu, late))

    def _bury(self, worker: ImageWorker) -> tuple[int, float]:
        """Wait for a worker's end, and release it. Returns the wait status and its processor
        time. All its writes have ended then.
        """
        self._selector.unregister(worker.socket)
        worker.channel.close()
        if worker.gate is not None:
            self._selector.unregister(worker.gate)
            worker.gate.close()
        _, status, used = os.wait4(worker.pid, 0)
        if os.WIFEXITED(status) and not worker.ready:
            raise RuntimeError("an image worker failed to start")
        return status, used.ru_utime + used.ru_stime

    def _be_worker(
        self, number: int, connection: socket.socket, outbox: Outbox | None, supervisor: int
    ) -> NoReturn:
        """Run a worker in this process, just forked, to its end."""
        status = 1
        try:
            if follows(supervisor, b"saccade-" + self._kind):
                # To be read, not written: a worker shall not change what comes after its order.
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
    """Return the CPU time that a child has taken, or 0 if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
    except OSError:
        return 0.0  # it has ended


def follows(parent: int, name: bytes) -> bool:
    """Name this process, just forked, to end with `parent`.

    Returns True if the parent still lives.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, name)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


@dataclass(frozen=True, slots=True)
class SupervisorFiles:
    """A supervisor's descriptors from the requester, in this process."""

    wanted: SupervisorOptions
    front: int
    lifeline: int
    arena: int | None
    inboxes: tuple[int, ...]

    @classmethod
    def unpack(
        cls, wanted: SupervisorOptions, descriptors: list[int]
    ) -> tuple[SupervisorFiles, int]:
        """Unpack the descriptors, and the pipe for the exit status."""
        front, lifeline, report, *others = descriptors
        arena = others.pop(0) if wanted.arena_bytes else None
        return cls(wanted, front, lifeline, arena, tuple(others)), report

    def close(self) -> None:
        for descriptor in (self.front, self.lifeline, self.arena, *self.inboxes):
            if descriptor is not None:
                os.close(descriptor)


def fork_server(link: ParentLink) -> int:
    """Fork a supervisor whenever the front asks for one, and report its exit status at its end. The
    status is negative for a killing signal. Returns exit status 0 once the front has exited.
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
    """Take note of all ended children: supervisors, and workers whose supervisor was killed."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid in reports:
                report = reports.pop(pid)
                with contextlib.suppress(BrokenPipeError):  # no request waits for it any more
                    os.write(report, EXIT_STATUS.pack(os.waitstatus_to_exitcode(status)))
                os.close(report)


def be_supervisor(files: SupervisorFiles, parent: int) -> NoReturn:
    """Run a supervisor in this process, just forked, to its end."""
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
    # here, not above: the front, which starts this module, must not read images
    from PIL import AvifImagePlugin

    boot, link = enter(Boot)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, b"saccade-images")
    keep_freed(KEPT_BYTES)
    libc.mallopt(M_ARENA_MAX, 1)  # a second thread's would take 64 MiB of a worker's address space
    PIL.Image.MAX_IMAGE_PIXELS = None  # headers are compared with our own limit
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # as all else here: a worker may begin no thread
    begin_imports()
    warm_up(boot.decodes, boot.own)
    end_imports()  # a later collection would copy pages that a fork leaves as they are
    return fork_server(link)


def warm_up(decode: bool, own: OwnPixels | None) -> None:
    """Load the workers' libraries once for all, since workers may open no file. For decoding this
    takes a second or two. own: as in `Boot`.
    """
    from saccade.media.formats.decode import FORMATS
    from saccade.media.formats.header import probe

    images = [heif.SAMPLE] if heif.INSTALLED else []
    plain = [("RGB", kind) for kind in set(FORMATS) - set(heif.FORMATS)]
    # L*a*b* has Pillow load its colour management
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
