"""The messages between the front end, the supervisors and the image workers: orders and their
answers.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from saccade.core.recipe import Box, OwnPixels, PageDrawing, PreprocessParams
from saccade.ipc.child import Codec
from saccade.media.content import Probe
from saccade.media.reasons import Reason

HEADER_BYTES = 512 << 20
"""Maximum memory for reading a header."""
VIDEO_CPU_SECONDS = 4.0
"""Maximum CPU time for listing a video's packets. A file of 28 MB takes 20 ms."""
HEADER_CPU_SECONDS = 0.25
"""Maximum CPU time for reading a header: a hundred times the time for any camera's images."""

KEPT_BYTES = 64 << 20
"""Freed memory up to this size is kept for the next job, because zeroing new pages in the kernel
can take as long as decoding.
"""

OUTBOX_SPARE = 1 << 20
"""An outbox is this much larger than the arena, because targets are aligned to `OUTBOX_STEP`."""
OUTBOX_STEP = 64
TO_FRONT = -1
"""A target's offset if its pixels are returned to the front end instead of being written to the
arena. The supervisor writes them to the worker's inbox, after the encoded image.
"""
MAX_RETURNED = 64 << 20
"""Maximum bytes of pixels that one order can return to the front end."""

SIZES_HEAD_BYTES, SIZE_BYTES = 64, 18
"""Outbox bytes for a document's page sizes: the msgpack header, and the two numbers of each page.
"""
TEXT_BYTES = 1 << 20
"""Outbox bytes for a page's text. This is far more than `pdf.MAX_TEXT` characters need."""

EXIT_STATUS = struct.Struct("<i")
"""The message in which a fork server reports a supervisor's exit status."""
MAX_DESCRIPTORS = 253
"""Linux's limit of file descriptors in one message (SCM_MAX_FD)."""


@dataclass(frozen=True, slots=True)
class Boot:
    """The options of a fork server, sent when it starts."""

    decodes: bool  # whether its workers decode pixels, or only read headers and documents
    own: OwnPixels | None = None  # the model family's preprocessing operation to load, if any


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """A request to fork a supervisor.

    These file descriptors are sent with it:

    - the supervisor's socket
    - the write end of a pipe that the supervisor and its workers keep open. It is closed when the
      last of them has exited.
    - the write end of a pipe to which the fork server writes the supervisor's exit status
    - the arena, if `arena_bytes` is not 0
    - a memory file (inbox) for each worker. The last worker is forked by its first `ReplaceWorker`.
    """

    memory: int  # bytes by which a worker's address space may grow, even if its code is hostile
    arena_bytes: int = 0  # 0 for workers that read headers or documents
    outbox_bytes: int = 0  # per worker; 0 for workers that read headers


@dataclass(frozen=True, slots=True)
class ReadHeaders:
    """Read the headers of images or videos in the inbox. There is one answer per header."""

    worker: int
    serial: int
    places: tuple[tuple[int, int], ...]  # (offset, bytes) of each; offsets are page-aligned
    max_pixels: int
    videos: bool = False  # whether these are videos, whose frames are counted too

    @property
    def answers(self) -> int:
        return len(self.places)

    @property
    def seconds(self) -> float:
        """The CPU time limit per header that the worker itself enforces."""
        return VIDEO_CPU_SECONDS if self.videos else HEADER_CPU_SECONDS

    @property
    def cpu(self) -> float:
        """The CPU time limit per header, at which the supervisor kills the worker."""
        return 2 * self.seconds


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode an image or video in the inbox once, for all targets."""

    worker: int
    serial: int
    nbytes: int  # size of the encoded image
    upright: tuple[int, int]  # (height, width) after the orientation is applied
    orientation: int  # EXIF orientation, 1 to 8
    # (offset in the arena or `TO_FRONT`, preprocessing parameters)
    targets: tuple[tuple[int, PreprocessParams], ...]
    memory: int  # bytes that decoding may allocate
    threads: int = 0  # how many threads the decoder may start
    frames: tuple[int, ...] = ()  # for a video, the frame's index per target
    # The region of the upright image per target. Empty if all targets show the full image.
    regions: tuple[Box | None, ...] = ()
    answers: ClassVar[int] = 1
    cpu: ClassVar[float] = math.inf

    @property
    def outbox(self) -> tuple[int, ...]:
        """The offset of each target in the worker's outbox, followed by the end of the last one."""
        places = [0]
        for _, recipe in self.targets:
            nbytes = 3 * prod(recipe.canvas)
            places.append(places[-1] + -(-nbytes // OUTBOX_STEP) * OUTBOX_STEP)
        return tuple(places)

    @property
    def answer_at(self) -> int:
        """The offset in the inbox to which the outbox's offset 0 is copied, for `TO_FRONT`."""
        return -(-self.nbytes // OUTBOX_STEP) * OUTBOX_STEP


@dataclass(frozen=True, slots=True)
class PageWanted:
    """What to read of a page of a document: its text, its image (`drawing`), or both."""

    index: int
    drawing: PageDrawing | None
    text: bool
    short: bool = False  # leave out a text that is too long for draft tokens


def piece_bytes(page: PageWanted) -> int:
    """Return how many bytes of the outbox a page needs. A PNG can be slightly larger than its raw
    pixels.
    """
    pixels = 0 if page.drawing is None else prod(page.drawing.kept)
    return -(-(TEXT_BYTES + 3 * pixels + pixels // 64) // OUTBOX_STEP) * OUTBOX_STEP


@dataclass(frozen=True, slots=True)
class ReadDocument:
    """Read pages of a document in the inbox, or the sizes of all its pages.

    There is one answer per page, or one with all sizes. The supervisor copies the results into the
    inbox, after the document.
    """

    worker: int
    serial: int
    nbytes: int  # size of the document
    most_pages: int  # the maximum number of pages in the document
    pages: tuple[PageWanted, ...]  # empty to read the sizes
    memory: int  # bytes that reading may allocate
    cpu: float  # CPU time limit per answer, in seconds

    @property
    def answers(self) -> int:
        return max(1, len(self.pages))

    @property
    def outbox(self) -> tuple[int, ...]:
        """The offset of each result in the worker's outbox, followed by the end of the last one."""
        if not self.pages:
            return (0, SIZES_HEAD_BYTES + SIZE_BYTES * self.most_pages)
        places = [0]
        for page in self.pages:
            places.append(places[-1] + piece_bytes(page))
        return tuple(places)

    @property
    def answer_at(self) -> int:
        """The offset in the inbox to which the first result is copied."""
        return -(-self.nbytes // OUTBOX_STEP) * OUTBOX_STEP


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a worker if order `serial` is still its last one. The answer is `Lost`."""

    worker: int
    serial: int


@dataclass(frozen=True, slots=True)
class ReplaceWorker:
    """Kill a worker, if it was forked, empty its outbox, and fork another one.

    `WorkerReplaced` is sent once every process that has read an earlier order has exited.
    """

    worker: int
    serial: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one image in a `ReadHeaders` order, or why it could not be read."""

    worker: int
    serial: int
    place: int  # the image's index in the order
    probe: Probe | None
    reason: Reason | None = None
    slow: bool = False  # whether reading exceeded the CPU time limit


@dataclass(frozen=True, slots=True)
class Decoded:
    """The answer to a `Decode` order that has finished.

    A worker sends it once the pixels are in its outbox. The supervisor copies them into the arena
    before it forwards the answer to the front end.
    """

    worker: int
    serial: int
    reason: Reason | None  # why decoding failed; `None` if it succeeded
    ms: float


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """One result of a `ReadDocument` order, or why it could not be read."""

    worker: int
    serial: int
    place: int  # the page's index in the order
    nbytes: int  # size of the result
    reason: Reason | None = None
    cpu: float = 0.0  # seconds of CPU time, measured by the supervisor


@dataclass(frozen=True, slots=True)
class Lost:
    """Reports that a worker has exited and was replaced. It writes no more to its outbox."""

    worker: int
    serial: int  # its last order
    signal: int  # the signal that killed it, or 0
    cpu: float = 0.0  # seconds of CPU time since the order, or since the order's last answer
    late: bool = False  # whether it was killed for exceeding the order's CPU time limit


@dataclass(frozen=True, slots=True)
class WorkerReplaced:
    """Reports that a new process has replaced a worker, as requested by `ReplaceWorker`."""

    worker: int
    serial: int


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """Reports that all workers are ready for orders.

    exposed: sandbox restrictions that the kernel does not support.
    """

    exposed: tuple[str, ...] = ()


Work = ReadHeaders | Decode | ReadDocument
Order = Work | Kill | ReplaceWorker
Answer = Header | Decoded | DocumentPiece | Lost | WorkerReplaced | WorkersReady
FRONT: Codec[Order, Answer] = Codec(Order, Answer)
SUPERVISOR: Codec[Answer, Order] = Codec(Answer, Order)
