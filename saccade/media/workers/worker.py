"""Orders to image workers, their answers, and their life. Workers are processes that read headers,
decode images or read documents, each one at a time, and may die from hostile bytes.

`media/workers/supervisor.py` forks them. Before the first order a worker gives up everything named
by `sandbox.py`. Left are a socket to the supervisor, the encoded bytes from the front, to be read,
and for pixels an outbox. The outbox is the worker's own memory, copied by the supervisor into the
arena, which no worker ever has. A worker reads one tenant's bytes, and ends before another's come
(`ReplaceWorker`). All effects from hostile bytes (crash, hang, code that stays) end with the
process.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from saccade.core.recipe import Box, ImageRecipe, OwnPixels, PageDrawing
from saccade.ipc.child import Channel, Codec, Disconnected
from saccade.media.content import Probe
from saccade.media.reasons import Reason, Undecodable, Unreadable

HEADER_BYTES = 512 << 20
"""Memory that reading a header may take."""
VIDEO_CPU_SECONDS = 4.0
"""Processor time that listing a video's packets may take: 20 ms for 28 MB."""
HEADER_CPU_SECONDS = 0.25
"""Processor time that reading a header may take: a hundred times what any camera's takes."""

KEPT_BYTES = 64 << 20
"""Freed memory that is kept for the next job: having the kernel clear it again can cost as much as
decoding.
"""

OUTBOX_SPARE = 1 << 20
"""Bytes of an outbox beyond the arena's: each target begins at a multiple of `OUTBOX_STEP`."""
OUTBOX_STEP = 64
TO_FRONT = -1
"""In place of an offset in the arena: these pixels go to the front's memory, behind the image."""
MOST_RETURNED = 64 << 20
"""Bytes of pixels that one order may send there."""

SIZES_HEAD_BYTES, SIZE_BYTES = 64, 18
"""Of the outbox, for the sizes of pages: msgpack's head, and each page's two numbers."""
TEXT_BYTES = 1 << 20
"""The same for a page's text, by far more than `pdf.MOST_TEXT` characters, and all around it."""

EXIT_STATUS = struct.Struct("<i")
"""As a fork server tells a supervisor's."""
MOST_DESCRIPTORS = 253
"""The kernel passes so many with one message."""


@dataclass(frozen=True, slots=True)
class Boot:
    """The order to a fork server at its start: workers decode, or read headers only. own: the
    family's operation that recipes name, if any.
    """

    decodes: bool
    own: OwnPixels | None = None


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """The order to fork a supervisor. `memory` is the most bytes that hostile code in a worker may
    take. Then come the bytes of the arena and of each worker's outbox. Header workers lack arena
    and outbox, document workers only the arena.

    Descriptors come along:

    - the supervisor's socket
    - the write end of a pipe held by the supervisor and its workers, closed when the last has gone
    - the write end of a pipe for the supervisor's exit status, from the fork server
    - the arena's, if any
    - a memory file for each worker
    """

    memory: int
    arena_bytes: int = 0
    outbox_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadHeaders:
    """Read the headers of images in the inbox. `places` has (offset, bytes) of each, with offsets
    on pages. For `videos`, count the frames too.
    """

    worker: int
    serial: int
    places: tuple[tuple[int, int], ...]
    max_pixels: int
    videos: bool = False

    @property
    def answers(self) -> int:
        return len(self.places)

    @property
    def seconds(self) -> float:
        """Return the processor time for each header, by the worker's own clock."""
        return VIDEO_CPU_SECONDS if self.videos else HEADER_CPU_SECONDS

    @property
    def cpu(self) -> float:
        """Return the processor time for code that goes on when told to stop."""
        return 2 * self.seconds


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode the inbox's first `nbytes`, an image of `upright` (height, width), once for all
    targets. A target is (offset in the arena or `TO_FRONT`, recipe).

    The order may take `memory` bytes, and begin `threads`. `outbox`: where each target begins in
    the worker's own memory. frames: of a video, by target. regions: parts of the upright image, by
    target, where some show a part alone.
    """

    worker: int
    serial: int
    nbytes: int
    upright: tuple[int, int]
    orientation: int
    targets: tuple[tuple[int, ImageRecipe], ...]
    memory: int
    threads: int = 0
    frames: tuple[int, ...] = ()
    regions: tuple[Box | None, ...] = ()
    answers: ClassVar[int] = 1
    cpu: ClassVar[float] = math.inf

    @property
    def outbox(self) -> tuple[int, ...]:
        places = [0]
        for _, recipe in self.targets:
            nbytes = 3 * prod(recipe.canvas)
            places.append(places[-1] + -(-nbytes // OUTBOX_STEP) * OUTBOX_STEP)
        return tuple(places)

    @property
    def answer_at(self) -> int:
        """Return where the outbox's pieces for the front begin in the inbox."""
        return -(-self.nbytes // OUTBOX_STEP) * OUTBOX_STEP


@dataclass(frozen=True, slots=True)
class PageWanted:
    """A page of a document: its text, or its image, or both."""

    index: int
    drawing: PageDrawing | None
    text: bool


def piece_bytes(page: PageWanted) -> int:
    """Return the outbox bytes for a page. A PNG may have a little more than its pixels."""
    pixels = 0 if page.drawing is None else prod(page.drawing.kept)
    return -(-(TEXT_BYTES + 3 * pixels + pixels // 64) // OUTBOX_STEP) * OUTBOX_STEP


@dataclass(frozen=True, slots=True)
class ReadDocument:
    """Read these pages of the document of `nbytes` in the inbox. Without pages, read the sizes of
    all, which may be `most_pages`.

    The order may take `memory` bytes, and each piece `cpu` seconds of processor time. Pieces come
    behind the document, a piece for each page.
    """

    worker: int
    serial: int
    nbytes: int
    most_pages: int
    pages: tuple[PageWanted, ...]
    memory: int
    cpu: float

    @property
    def answers(self) -> int:
        return max(1, len(self.pages))

    @property
    def outbox(self) -> tuple[int, ...]:
        """Return where each piece begins in the worker's own memory."""
        if not self.pages:
            return (0, SIZES_HEAD_BYTES + SIZE_BYTES * self.most_pages)
        places = [0]
        for page in self.pages:
            places.append(places[-1] + piece_bytes(page))
        return tuple(places)

    @property
    def answer_at(self) -> int:
        """Return where the first piece begins in the inbox."""
        return -(-self.nbytes // OUTBOX_STEP) * OUTBOX_STEP


@dataclass(frozen=True, slots=True)
class Kill:
    """End a worker, unless done with order `serial` and busy with another. `Lost` answers."""

    worker: int
    serial: int


@dataclass(frozen=True, slots=True)
class ReplaceWorker:
    """End a worker without an order, empty its outbox, and fork another. `WorkerReplaced` answers
    once every process that has read an earlier order has gone.
    """

    worker: int
    serial: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of the image at `place` in an order, or the reason against the image.

    `slow`: given up for the time taken.
    """

    worker: int
    serial: int
    place: int
    probe: Probe | None
    reason: Reason | None = None
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Decoded:
    """An order is done, after `ms`. `reason` is `None` if the pixels lie in the outbox. As the
    front hears it, they lie in the arena.
    """

    worker: int
    serial: int
    reason: Reason | None
    ms: float


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """Reply for piece `place` in the order's document: its size, or the reason for none. `cpu` is
    the seconds of processor time that the piece took, as the supervisor says.
    """

    worker: int
    serial: int
    place: int
    nbytes: int
    reason: Reason | None = None
    cpu: float = 0.0


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker has ended by `signal`, or 0, and has a successor. The last order was `serial`, and
    all its writes have ended. `cpu` is the seconds of processor time since the order, or since its
    last answer. `late` means that these were more than the order allows.
    """

    worker: int
    serial: int
    signal: int
    cpu: float = 0.0
    late: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReplaced:
    """A worker has a successor that has read nothing."""

    worker: int
    serial: int


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """All workers take orders. `exposed`: rights that the kernel would not take away."""

    exposed: tuple[str, ...] = ()


Work = ReadHeaders | Decode | ReadDocument
Order = Work | Kill | ReplaceWorker
Answer = Header | Decoded | DocumentPiece | Lost | WorkerReplaced | WorkersReady
FRONT: Codec[Order, Answer] = Codec(Order, Answer)
SUPERVISOR: Codec[Answer, Order] = Codec(Answer, Order)


Bytes = npt.NDArray[np.uint8]
Target = tuple[Bytes, ImageRecipe]
"""As in `media/formats/decode.py`."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerResources:
    """A worker's possessions: encoded bytes as a file, memory for pixels (empty to read headers),
    and the file with the address space's size. threads: may begin some.
    """

    inbox: int
    outbox: Bytes
    statm: int
    threads: bool = False


def serve(channel: Channel[Answer, Order], resources: WorkerResources) -> None:
    """Take orders and send answers until the supervisor has gone."""
    with contextlib.suppress(Disconnected):
        while True:
            order = channel.receive()
            if isinstance(order, ReadHeaders):
                for place in range(len(order.places)):
                    channel.send(read_header(order, place, resources))
            elif isinstance(order, ReadDocument):
                for place in range(order.answers):
                    channel.send(read_piece(order, place, resources))
            elif isinstance(order, Decode):
                begun = time.perf_counter()
                reason = decode(order, resources)
                ms = (time.perf_counter() - begun) * 1e3
                channel.send(Decoded(order.worker, order.serial, reason, ms))


class TimeUp(BaseException):
    """An error whose class no parser catches."""


def read_header(order: ReadHeaders, place: int, resources: WorkerResources) -> Header:
    """Read one header of an order."""
    # here, not above: the front, which imports this module's messages, must not read headers
    from saccade.media.formats.header import probe

    if order.videos:
        from saccade.media.formats.container import read_metadata as probe  # type: ignore[assignment]

    offset, nbytes = order.places[place]

    def answer(found: Probe | None, reason: Reason | None = None, slow: bool = False) -> Header:
        return Header(order.worker, order.serial, place, found, reason, slow)

    with limited_memory(HEADER_BYTES + 2 * nbytes, resources.statm):
        try:
            if not nbytes:
                return answer(probe(b"", order.max_pixels))
            with (
                mmap.mmap(resources.inbox, nbytes, prot=mmap.PROT_READ, offset=offset) as data,
                limited_time(order.seconds),
            ):
                return answer(probe(data, order.max_pixels))
        except Unreadable as error:
            return answer(None, error.reason)
        except MemoryError:
            return answer(None, Reason("header memory"))
        except TimeUp:
            return answer(None, Reason("header time"), slow=True)


def read_piece(order: ReadDocument, place: int, resources: WorkerResources) -> DocumentPiece:
    """Read one page of a document, or the sizes of all, into the outbox."""
    from saccade.media.formats import pdf  # here, not above: where the extra is not installed

    def answer(nbytes: int, reason: Reason | None = None) -> DocumentPiece:
        return DocumentPiece(order.worker, order.serial, place, nbytes, reason)

    with (
        limited_memory(order.memory, resources.statm),
        mmap.mmap(resources.inbox, order.nbytes, prot=mmap.PROT_READ) as data,
    ):
        try:
            if order.pages:
                page = order.pages[place]
                found: object = pdf.read_page(data, page.index, page.drawing, page.text)
            else:
                found = pdf.read_sizes(data, order.most_pages)
            packed = msgspec.msgpack.encode(found)
            start, end = order.outbox[place : place + 2]
            if len(packed) > end - start:
                raise MemoryError
            resources.outbox[start : start + len(packed)] = np.frombuffer(packed, np.uint8)
        except Unreadable as error:
            return answer(0, error.reason)
        except MemoryError:
            return answer(0, Reason("page memory"))
        return answer(len(packed))


def decode(order: Decode, resources: WorkerResources) -> Reason | None:
    """Decode one order. Returns the reason for a failure."""
    # here, not above: the worker that reads headers has no use for it
    from saccade.media.formats.decode import decode_into

    if order.threads and not resources.threads:
        return Reason("no threads")
    with mmap.mmap(resources.inbox, order.nbytes, prot=mmap.PROT_READ) as held:
        data = memoryview(held)
        targets: list[Target] = []
        for (_, recipe), start in zip(order.targets, order.outbox):
            pixels = resources.outbox[start : start + 3 * prod(recipe.canvas)]
            targets.append((pixels.reshape(*recipe.canvas, 3), recipe))
        with limited_memory(order.memory, resources.statm):
            try:
                if order.frames:
                    _decode_video(order, held, targets)
                else:
                    shape = order.upright, order.orientation
                    decode_into(targets, data, *shape, order.regions)
            except Undecodable as error:
                return error.reason
            except ValueError:
                return Reason("damaged")
            except MemoryError:
                return Reason("memory")
            except (ImportError, OSError):  # what a library loads late: `warm_up`
                return Reason("late load")
            finally:
                data.release()
    return None


def _decode_video(order: Decode, held: mmap.mmap, targets: Sequence[Target]) -> None:
    """Fill each target from a frame of the video. Raises Undecodable."""
    from saccade.media.formats.container import decode_frames
    from saccade.media.formats.decode import draw_into, turn

    height, width = order.upright
    stored = (width, height) if order.orientation >= 5 else (height, width)
    wanted: dict[int, list[Target]] = {}
    for target, index in zip(targets, order.frames, strict=True):
        wanted.setdefault(index, []).append(target)

    def take(index: int, pixels: Bytes) -> None:
        upright = turn(pixels, order.orientation)
        draw_into(wanted[index], order.upright, lambda top, bottom: upright[top:bottom])

    decode_frames(held, list(wanted), stored, take)


@contextmanager
def limited_memory(more: int, statm: int) -> Iterator[None]:
    """Let this process's address space grow by at most `more` bytes from here. `statm` is the open
    file in /proc with the size.
    """
    pages = int(os.pread(statm, 64, 0).split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + more
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise TimeUp once this process has computed for `seconds`. Native code ends first."""

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
