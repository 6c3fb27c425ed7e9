"""Orders to image workers and their answers, as the front and the supervisors send them."""

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
MAX_RETURNED = 64 << 20
"""Bytes of pixels that one order may send there."""

SIZES_HEAD_BYTES, SIZE_BYTES = 64, 18
"""Of the outbox, for the sizes of pages: msgpack's head, and each page's two numbers."""
TEXT_BYTES = 1 << 20
"""The same for a page's text, by far more than `pdf.MAX_TEXT` characters, and all around it."""

EXIT_STATUS = struct.Struct("<i")
"""As a fork server tells a supervisor's."""
MAX_DESCRIPTORS = 253
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
    - the write end of a pipe held by the supervisor and its workers, closed when the last has
      exited
    - the write end of a pipe for the supervisor's exit status, from the fork server
    - the arena's, if any
    - a memory file for each worker; the last worker is forked by its first `ReplaceWorker`
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
        """Return the CPU time for each header, by the worker's own clock."""
        return VIDEO_CPU_SECONDS if self.videos else HEADER_CPU_SECONDS

    @property
    def cpu(self) -> float:
        """Return the CPU time limit for code that ignores a request to stop."""
        return 2 * self.seconds


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode the inbox's first `nbytes`, an image of `upright` (height, width), once for all
    targets. A target is (offset in the arena or `TO_FRONT`, recipe).

    The order may take `memory` bytes, and begin `threads`. `outbox`: where each target begins in
    the worker's own memory.
    """

    worker: int
    serial: int
    nbytes: int
    upright: tuple[int, int]
    orientation: int
    targets: tuple[tuple[int, PreprocessParams], ...]
    memory: int
    threads: int = 0
    frames: tuple[int, ...] = ()  # of a video, by target
    # parts of the upright image, by target, where some show a part alone
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

    The order may take `memory` bytes, and each piece `cpu` seconds of CPU time. Pieces come
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
    """End a worker without an order, if there is one, empty its outbox, and fork another.
    `WorkerReplaced` answers once every process that has read an earlier order has exited.
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
    """An order is done, after `ms`. `reason` is `None` if the pixels are in the outbox. When the
    front gets it, they are in the arena.
    """

    worker: int
    serial: int
    reason: Reason | None
    ms: float


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """Reply for piece `place` in the order's document: its size, or the reason for none. `cpu` is
    the seconds of CPU time that the piece took, measured by the supervisor.
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
    all its writes have ended. `cpu` is the seconds of CPU time since the order, or since its
    last answer. `late` means that these were more than the order allows.
    """

    worker: int
    serial: int
    signal: int
    cpu: float = 0.0
    late: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReplaced:
    """A worker was replaced by a fresh one."""

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
