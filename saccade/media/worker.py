"""Image workers: processes that read headers and decode images, one image at a time each, and may
die of them.

Started by `media/lanes.py` as `python -m saccade.media.worker`. That process, a stock, loads what
workers need and forks a nursery, which forks the workers. There are two: one for workers that read
headers, which has no torch and starts in a moment, and one for those that decode into the arena. A
nursery passes orders and answers on, ends a worker when told, and forks another in the place of one
that has ended, in milliseconds. It never looks at an image. A stock does nothing but fork the next
nursery when one was killed, so that nothing is loaded again. Encoded bytes lie in memory files, one
per worker, that the front fills. A worker keeps nothing between orders; whatever hostile bytes do
to it (crash, hang, blow up) ends with that process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import PIL.Image

from saccade.core.arena import Arena
from saccade.core.child import Channel, Codec, Disconnected, ParentLink, enter
from saccade.core.errors import ImageError
from saccade.core.garbage import settle
from saccade.core.plan import PixelSlot
from saccade.core.recipe import ImageRecipe
from saccade.media.content import Probe

HEADER_BYTES = 512 << 20
"""Memory that reading a header may take."""
HEADER_CPU_SECONDS = 0.25
"""Processor time that reading a header may take: a hundred times what any camera's takes."""

KEPT_BYTES = 64 << 20
"""Freed memory that is kept for the next job: having the kernel clear it again can cost as much as
decoding.
"""

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True)
class Boot:
    """What a stock is told at its start: whether its workers decode or read headers, the arena, and
    a memory file for each worker.
    """

    decode: bool
    arena: int
    arena_bytes: int
    inboxes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadHeaders:
    """Read the headers of images in the inbox: (offset, bytes) of each, offsets on pages."""

    worker: int
    serial: int
    places: tuple[tuple[int, int], ...]
    max_pixels: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode the inbox's first `nbytes`, an image of `upright` (height, width), once, for each
    target: (offset in the arena, what is made of it there). It may take `memory` bytes.
    """

    worker: int
    serial: int
    nbytes: int
    upright: tuple[int, int]
    orientation: int
    targets: tuple[tuple[int, ImageRecipe], ...]
    memory: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End a worker, unless it has done its order `serial` and has another. `Lost` answers."""

    worker: int
    serial: int


@dataclass(frozen=True, slots=True)
class Header:
    """Of the image at `place` in an order: what its header says, or why it cannot be used.

    `slow`: reading it was given up for the time it took.
    """

    worker: int
    serial: int
    place: int
    probe: Probe | None
    error: str = ""
    code: str = ""
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Decoded:
    """An order is done, after `ms`: `error` is None when the pixels lie in the arena."""

    worker: int
    serial: int
    error: str | None
    ms: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker has ended, by signal `signal`, or 0, and another is in its place; its last order was
    `serial`. Nothing writes for that order any more.
    """

    worker: int
    serial: int
    signal: int


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """All workers take orders."""


Order = ReadHeaders | Decode | Kill
Answer = Header | Decoded | Lost | WorkersReady
FRONT: Codec[Order, Answer] = Codec(Order, Answer)
NURSERY: Codec[Answer, Order] = Codec(Answer, Order)


@dataclass(slots=True, eq=False)
class ImageWorker:
    """A forked process as the nursery sees it. `serial` is its last order's."""

    number: int
    pid: int
    socket: socket.socket
    channel: Channel[Order, Answer]
    serial: int = field(default=-1)


class Nursery:
    """Forks workers, and passes messages between them and the front."""

    def __init__(self, boot: Boot, front: socket.socket, arena: Arena) -> None:
        self._boot = boot
        self._socket = front
        self._arena = arena
        self._front = Channel(front, NURSERY)
        self._selector = selectors.DefaultSelector()
        self._selector.register(front, selectors.EVENT_READ, None)
        self._workers: dict[int, ImageWorker] = {}

    def fork(self, number: int) -> None:
        """Put a new worker into a place."""
        ours, theirs = socket.socketpair()
        nursery = os.getpid()
        pid = os.fork()
        if not pid:
            self._be_worker(number, theirs, nursery)
        theirs.close()
        worker = ImageWorker(number, pid, ours, Channel(ours, FRONT))
        self._workers[number] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def run(self) -> None:
        """Until the front has gone. No worker is left then."""
        with contextlib.suppress(Disconnected):
            self._front.send(WorkersReady())
            while True:
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._pass_on(self._front.receive())
                    else:
                        self._answer(key.data)
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers.values():
            os.waitpid(worker.pid, 0)

    def _pass_on(self, order: Order) -> None:
        worker = self._workers[order.worker]
        if isinstance(order, Kill):
            if order.serial == worker.serial:
                os.kill(worker.pid, signal.SIGKILL)
            return
        worker.serial = order.serial
        with contextlib.suppress(Disconnected):  # it has ended: its socket tells, in a moment
            worker.channel.send(order)

    def _answer(self, worker: ImageWorker) -> None:
        try:
            answer = worker.channel.receive()
        except Disconnected:
            self._selector.unregister(worker.socket)
            worker.channel.close()
            _, status = os.waitpid(worker.pid, 0)
            self.fork(worker.number)
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            answer = Lost(worker.number, worker.serial, number)
        self._front.send(answer)

    def _be_worker(self, number: int, connection: socket.socket, nursery: int) -> NoReturn:
        """Work as a worker in this process, which was forked, to its end."""
        status = 1
        try:
            if follows(nursery, b"saccade-decode" if self._boot.decode else b"saccade-header"):
                self._selector.close()
                self._socket.close()
                for other in self._workers.values():
                    other.socket.close()
                for place, inbox in enumerate(self._boot.inboxes):
                    if place != number:
                        os.close(inbox)
                serve(Channel(connection, NURSERY), self._boot.inboxes[number], self._arena)
            status = 0
        finally:
            os._exit(status)


def follows(parent: int, name: bytes) -> bool:
    """Name this process, which was forked, and have it end with `parent`; whether that still is."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, name)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def stock(boot: Boot, link: ParentLink, arena: Arena) -> int:
    """Fork a nursery for each socket that the front sends, one after the other; exit status 0 once
    the front has gone. A nursery that was killed says nothing against the next; one that failed by
    itself ends this process too, with its status.

    Beside the socket comes the write end of a pipe, which the nursery and its workers hold: it is
    closed when the last of them has gone.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    while True:
        _, received, _, _ = socket.recv_fds(link.socket, 1, 2)
        if not received:
            return 0
        front, lifeline = received
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            link.socket.close()
            be_nursery(boot, socket.socket(fileno=front), arena, parent)
        os.close(front)
        os.close(lifeline)
        ended = 0
        while ended != pid:  # also workers of a nursery that was killed
            ended, status = os.wait()
        if os.WIFEXITED(status) and (code := os.WEXITSTATUS(status)):
            return code


def be_nursery(boot: Boot, front: socket.socket, arena: Arena, parent: int) -> NoReturn:
    """Be a nursery in this process, which was forked, to its end."""
    status = 1
    try:
        if follows(parent, b"saccade-nursery"):
            nursery = Nursery(boot, front, arena)
            for number in range(len(boot.inboxes)):
                nursery.fork(number)
            nursery.run()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def serve(channel: Channel[Answer, Order], inbox: int, arena: Arena) -> None:
    """A worker's life: orders in, answers out, until the nursery has gone."""
    with contextlib.suppress(Disconnected):
        while True:
            order = channel.receive()
            if isinstance(order, ReadHeaders):
                for place in range(len(order.places)):
                    channel.send(read_header(order, place, inbox))
            elif isinstance(order, Decode):
                begun = time.perf_counter()
                error = decode(order, inbox, arena)
                ms = (time.perf_counter() - begun) * 1e3
                channel.send(Decoded(order.worker, order.serial, error, ms))


class TimeUp(BaseException):
    """Of no class that parsers catch."""


def read_header(order: ReadHeaders, place: int, inbox: int) -> Header:
    """Read one header of an order."""
    # here, not above: the front, which imports this module's messages, must not read headers
    from saccade.media.header import probe

    offset, nbytes = order.places[place]

    def answer(found: Probe | None, error: str = "", code: str = "", slow: bool = False) -> Header:
        return Header(order.worker, order.serial, place, found, error, code, slow)

    with limited_memory(HEADER_BYTES + 2 * nbytes):
        try:
            if not nbytes:
                return answer(probe(b"", order.max_pixels))
            with (
                mmap.mmap(inbox, nbytes, prot=mmap.PROT_READ, offset=offset) as data,
                limited_time(HEADER_CPU_SECONDS),
            ):
                return answer(probe(data, order.max_pixels))
        except ImageError as error:
            return answer(None, error.message, error.code or "")
        except MemoryError:
            return answer(None, "reading the picture's header takes too much memory")
        except TimeUp:
            return answer(None, "reading the picture's header takes too long", slow=True)


def decode(order: Decode, inbox: int, arena: Arena) -> str | None:
    """Do one order; the reason why not, if not."""
    # here, not above: the worker that reads headers has no use for it
    from saccade.media.decode import decode_into

    with mmap.mmap(inbox, order.nbytes, prot=mmap.PROT_READ) as held:
        data = memoryview(held)
        targets = [
            (arena.view(PixelSlot(offset, *recipe.canvas)), recipe)
            for offset, recipe in order.targets
        ]
        with limited_memory(order.memory):
            try:
                decode_into(targets, data, order.upright, order.orientation)
            except ValueError as error:
                return str(error)
            except MemoryError:
                return "decoding it takes more memory than a picture of its size should"
            finally:
                data.release()
    return None


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let this process's address space grow by `more` bytes from here, no further."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise TooSlow once this process has computed for `seconds`; native code ends first."""

    def give_up(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGPROF, give_up)
    # More than once: a `finally` of a parser may hide the first.
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> int:
    boot, link = enter(Boot)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, b"saccade-images")
    libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES // 2)  # the most it takes
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    PIL.Image.MAX_IMAGE_PIXELS = None  # headers are compared with our own limit
    arena = Arena.attach(boot.arena, boot.arena_bytes)
    warm_up(boot.decode)
    settle()
    return stock(boot, link, arena)


def warm_up(decode: bool) -> None:
    """Load what the workers need, once for all. For decoding it takes a second or two."""
    if not decode:
        importlib.import_module("saccade.media.header")
        return
    import torch

    from saccade.media.decode import resize

    torch.set_num_threads(1)  # more would not live through a fork
    resize(np.empty((32, 32, 3), np.uint8), np.zeros((64, 64, 3), np.uint8))


if __name__ == "__main__":
    sys.exit(main())
