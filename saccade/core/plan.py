"""The messages from the scheduler to the workers: one immutable `Plan` per step, and the `Masks`
of its rows that follow a grammar.

Ranks never decide: everything a rank does in a step stands here. A worker keeps, per slot, what
`Open` told it and the tokens that were drawn there since, so a plan names positions, and of token
values only those that a grammar forced. Two plans may be in flight: step n+1 is planned and sent
while step n is computed, and a `StepResult` answers each, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from saccade.core.types import (
    Grid,
    Image,
    ImageKey,
    PromptReading,
    PromptScores,
    Readout,
    SamplingParams,
    Span,
    TokenLogprobs,
)

PLANS_IN_FLIGHT = 2
"""Plans that may be begun before the first one's result is known."""


@dataclass(frozen=True, slots=True)
class PixelSlot:
    """Where an image's canvas, uint8 RGB [height, width, 3], lies in the shared arena: `offset` in
    bytes. `room`: bytes from there on in which an embedding that another server made may lie
    instead; 0: none may.
    """

    offset: int
    height: int
    width: int
    room: int = 0

    @property
    def nbytes(self) -> int:
        return self.height * self.width * 3


@dataclass(frozen=True, slots=True)
class Open:
    """A sequence enters `slot`.

    `tokens` are the prompt and, after a preemption, the answer so far; the first `prompt_length`
    are the prompt. `pages` already hold KV for the first `len(pages) * page_size` tokens (the
    cached prefix). `prompt_logprobs`, `reading`: as in `Request`.
    """

    slot: int
    tokens: tuple[int, ...]
    prompt_length: int
    spans: tuple[Span, ...]
    images: tuple[Image, ...]
    sampling: SamplingParams
    pages: tuple[int, ...]
    prompt_logprobs: int | None = None
    reading: PromptReading | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Compute tokens `[start, start + length)` of `slot`, after appending `pages` to its page
    table. `sample`: draw the next token. `masked`: which tokens may be drawn follows in `Masks`,
    once the step before has told its tokens; the worker waits for it before it draws, not before it
    computes. `tokens`: those of the row, its last ones, that neither `Open` told nor a step drew.
    `scored`: prompt tokens [first, end) to score, each of which follows one of the row's. `read`:
    so many of the row's last tokens are read, as `Open.reading` says.
    """

    slot: int
    start: int
    length: int
    pages: tuple[int, ...]
    sample: bool
    masked: bool = False
    tokens: tuple[int, ...] = ()
    scored: tuple[int, int] | None = None
    read: int = 0


Place = Literal["device", "host", "staged", "disk"]
"""Where an embedding may lie. staged: read from disk, on its way to the device."""


@dataclass(frozen=True, slots=True)
class Move:
    """The embedding of `key` goes from `source` to `target`; None: it is dropped there.

    device <-> host, staged -> device: it leaves `source`. disk -> staged: it stays on disk too, and
    is read in the background, until `StepResult.disk` says how that went.
    """

    key: ImageKey
    source: Place
    target: Place | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Begin to run the vision tower on one image. It may take several steps; once
    `StepResult.encoded` names `key`, the embedding is on the device under it until it is moved.

    Until then nothing else is written to `pixels`, and no plan shows the image.
    given: tokens of the embedding that lies there instead of pixels, made by another server: it is
    taken over in this step, and the tower has nothing to do; 0: pixels lie there.
    """

    key: ImageKey
    grid: Grid
    patches: int
    pixels: PixelSlot
    given: int = 0


@dataclass(frozen=True, slots=True)
class Deliver:
    """Copy the embedding of `key`, which is on the device, into the arena at `offset`: it is
    there once the step has ended.
    """

    key: ImageKey
    num_tokens: int
    offset: int


@dataclass(frozen=True, slots=True)
class Splice:
    """Batch rows `[row, row + length)` are rows `[offset, offset + length)` of the embedding of
    `key`, not of the token table.
    """

    row: int
    length: int
    key: ImageKey
    offset: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state of a sequence, for models that keep one (`family.KVSpec`): line `source` of the
    workers' state memory goes to line `target`. The first lines are the slots, the others
    snapshots.
    """

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, executed in this order: close, open, moves, restore, encode, one forward over
    `rows`, snapshot, deliver, save.

    Batch rows are the concatenation of `rows` in order. Rows that decode come first, then prefill
    chunks.
    tower: patch-blocks (patches x blocks of the vision tower) that the step may spend on encodings
    that have begun and not ended, in the order in which they began; 0: no bound.
    save: embeddings on the device to be written to disk, in the background, once they are encoded.
    restore: snapshots that slots go on from. snapshot: states of slots to keep, as the step's rows
    leave them.
    wait: there is nothing to do before a read from disk or an encoding ends: wait for one.
    adapt: no request is alive; fit the vision tower's graphs to the traffic. Such a plan has
    nothing else in it.
    """

    step: int
    close: tuple[int, ...] = ()
    open: tuple[Open, ...] = ()
    moves: tuple[Move, ...] = ()
    encode: tuple[Encode, ...] = ()
    tower: int = 0
    save: tuple[ImageKey, ...] = ()
    deliver: tuple[Deliver, ...] = ()
    rows: tuple[Row, ...] = ()
    splices: tuple[Splice, ...] = ()
    restore: tuple[StateCopy, ...] = ()
    snapshot: tuple[StateCopy, ...] = ()
    wait: bool = False
    adapt: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def patches(self) -> int:
        """To be run through the vision tower."""
        return sum(encode.patches for encode in self.encode if not encode.given)

    @property
    def empty(self) -> bool:
        """Whether the step does nothing. A plan that only goes on with the tower is not empty."""
        work = self.close or self.open or self.moves or self.encode or self.rows
        beside = self.tower or self.save or self.deliver
        return not (work or beside or self.wait or self.adapt)


MOST_COMPARED = 16
"""Lines of masks that a row is compared with: about a microsecond for each that is alike."""


@dataclass(frozen=True, slots=True)
class Masks:
    """What the masked rows of a plan may draw, once the tokens of the step before are known; only
    for the rank that draws.

    words: int32 [L, ceil(V / 32)] as bytes; token t is bit t % 32 of word t // 32. lines: of each
    row with `masked`, in row order, its line: rows that are alike, as they are within texts, may
    share one, for lines are long (19 KB where V is 152,064).
    """

    step: int
    words: bytes
    lines: tuple[int, ...]

    @classmethod
    def of(cls, step: int, rows: Sequence[bytes]) -> Masks:
        """rows: words [ceil(V / 32)] of each row."""
        kept: list[bytes] = []
        late: list[int] = []  # lines of late, the last first: most rows are like one of these
        lines = []
        for row in rows:
            line = next((line for line in late if kept[line] == row), len(kept))
            if line == len(kept):
                kept.append(row)
            else:
                late.remove(line)
            late = [line, *late[: MOST_COMPARED - 1]]
            lines.append(line)
        return cls(step, b"".join(kept), tuple(lines))

    def rows(self) -> npt.NDArray[np.int32]:
        """[M, ceil(V / 32)], the caller's own."""
        count = max(self.lines) + 1
        return np.frombuffer(self.words, np.int32).reshape(count, -1)[list(self.lines)]


DiskEvent = tuple[ImageKey, Literal["read", "not read", "not saved"]]
"""What became of an embedding on disk.

not read: it counts as gone; it is there again once it has been encoded and saved again.
"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to the plan of `step`: one token per row with `sample`, in row order.
    `logprobs[i]` is None where none were asked for. `scores`, `readouts`: one per row with
    `scored`, or with `read`, in row order.

    `encoded`: images whose encoding has ended since the last step, the ms that it took (their
    pack's, shared by patches), and when it ended (`time.monotonic()`, which all processes of a
    machine share). Their pixels have been read; only these may be shown by later plans. `disk`:
    reads and writes that have ended since the last step. `unfinished`: there is more to adapt.
    `broken`: rows of the plan, by place, that came to values that are no numbers: what they drew,
    and the KV they wrote, mean nothing.
    `failed`: images for whose encoding the device had no memory; nothing of them is there, and
    their pixels are not read any more. `exhausted`: it had none for the plan's rows, of which
    nothing was computed.
    """

    step: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    encoded: tuple[tuple[ImageKey, float, float], ...] = ()
    disk: tuple[DiskEvent, ...] = ()
    unfinished: bool = False
    scores: tuple[PromptScores, ...] = ()
    broken: tuple[int, ...] = ()
    failed: tuple[ImageKey, ...] = ()
    exhausted: bool = False
    readouts: tuple[Readout, ...] = ()
