"""The messages from the scheduler to the workers: one immutable `Plan` per step, and the `Masks` of
its rows under a grammar.

Ranks never decide: a plan says everything that a rank does in a step. A worker keeps, per slot, the
content of `Open` and the tokens sampled since, so a plan names positions, and token values only if
a grammar forced them. Two plans may be in flight: step n+1 is planned and sent while step n is
computed, and a `StepResult` answers each, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from saccade.core.token_rules import TokenRules
from saccade.core.types import (
    Grid,
    Image,
    ImageKey,
    PromptScores,
    Readout,
    SamplingParams,
    Span,
    TokenLogprobs,
)

TOWER_RESTS = -1
"""As `Plan.tower`: no encoding goes on in this step."""

NO_LINE = -1
"""As `Row.keep`."""

PLANS_IN_FLIGHT = 2
"""Plans that may be begun before the first one's result is known."""


@dataclass(frozen=True, slots=True)
class PixelSlot:
    """The place of an image's canvas, uint8 RGB [height, width, 3], in the shared arena: `offset`
    in bytes. `room`: bytes from `offset` on for an embedding from another server instead; 0: no
    embedding may come.
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
    cached prefix). `rules`: as in `Request`; None: none. `adapter`: its number.
    """

    slot: int
    tokens: tuple[int, ...]
    prompt_length: int
    spans: tuple[Span, ...]
    images: tuple[Image, ...]
    sampling: SamplingParams
    pages: tuple[int, ...]
    rules: TokenRules | None = None
    adapter: int = 0


class ScoreRun(msgspec.Struct, frozen=True, tag="score"):
    """Score the prompt's tokens [first, end), each following a token of the row, and name the `top`
    likeliest beside each.
    """

    first: int
    end: int
    top: int


class ReadRun(msgspec.Struct, frozen=True, tag="read"):
    """Read the row's last `count` tokens: the logits of `labels`, or the state where none are
    named.
    """

    count: int
    labels: tuple[int, ...]


RowExtra = ScoreRun | ReadRun
"""What a row may be asked for beside its token. Structs, for their tags tell them apart."""


@dataclass(frozen=True, slots=True)
class Row:
    """Compute tokens `[start, start + length)` of `slot`, after appending `pages` to its page
    table. `sample`: sample the next token. `masked`: the allowed tokens follow in `Masks`, once the
    tokens of the step before are known; the worker waits for the mask before sampling, not before
    computing. `tokens`: the row's last tokens, if neither `Open` nor a step has told them.
    `draft`: its one token is a guess of what an earlier row of the step draws: the row counts only
    if that is what was drawn. `keep`: the line of the state memory that gets the sequence's state
    after the row, for models with states; `NO_LINE`: none but the slot's own. guess: the number of
    tokens for the model's head to guess after the one drawn, by this row or by the last of the
    right drafts behind it. `extras`: what else is asked for.
    """

    slot: int
    start: int
    length: int
    pages: tuple[int, ...]
    sample: bool
    masked: bool = False
    tokens: tuple[int, ...] = ()
    draft: bool = False
    keep: int = NO_LINE
    guess: int = 0
    extras: tuple[RowExtra, ...] = ()


Place = Literal["device", "host", "staged", "disk"]
"""The places of an embedding. staged: read from disk, on its way to the device."""


@dataclass(frozen=True, slots=True)
class Move:
    """Move the embedding of `key` from `source` to `target`; None: drop it from `source`.

    device <-> host, staged -> device: the embedding leaves `source`. disk -> staged: the embedding
    also stays on disk, and is read in the background, until `StepResult.disk` reports the outcome.
    """

    key: ImageKey
    source: Place
    target: Place | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Begin to run the vision tower on one image. Encoding may take several steps; once
    `StepResult.encoded` names `key`, the embedding is on the device under `key` until moved.

    Until then nothing else is written to `pixels`, and no plan shows the image. given: tokens of an
    embedding from another server that lies in place of the pixels: this step takes the embedding
    over without the tower; 0: pixels. adapter: the number of the one that the tower
    has meanwhile; 0: none. idle: nobody waits for it: others go first.
    """

    key: ImageKey
    grid: Grid
    patches: int
    pixels: PixelSlot
    given: int = 0
    adapter: int = 0
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Deliver:
    """Copy the embedding of `key` from the device into the arena at `offset`, by the end of the
    step.
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
    """Copy a sequence's state, for models with states (`family.KVSpec`): line `source` of the
    workers' state memory to line `target`. The first lines are the slots, then come snapshots, then
    the lines for states between guesses.
    """

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The KV page called `name`, and the page of the pool for the content; with `state`, the named
    state, and its line of the state memory.
    """

    name: bytes
    place: int
    state: bool = False


PageTier = Literal["host", "disk"]
"""A place for KV pages beside the device."""
PAGE_TIERS: tuple[PageTier, ...] = get_args(PageTier)
"""The quickest first."""


@dataclass(frozen=True, slots=True)
class TierMoves:
    """KV pages between the device and one tier, in this order.

    drop: remove from the tier. save: begin to write the page's present content, before anything
    else of the step. forget: a read of an earlier plan, ended or not, is not needed. fetch: begin
    to read; `StepResult.pages` tells the outcome. Nothing else touches the page until the read
    content is placed or forgotten. place: the page has the read content from now on.
    """

    drop: tuple[bytes, ...] = ()
    save: tuple[PageCopy, ...] = ()
    forget: tuple[bytes, ...] = ()
    fetch: tuple[PageCopy, ...] = ()
    place: tuple[PageCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.save or self.drop or self.fetch or self.forget or self.place)


NO_MOVES = TierMoves()


@dataclass(frozen=True, slots=True)
class PageMoves:
    """KV pages between the device and each tier."""

    host: TierMoves = NO_MOVES
    disk: TierMoves = NO_MOVES

    def __bool__(self) -> bool:
        return bool(self.host) or bool(self.disk)

    @property
    def fetched(self) -> Iterator[tuple[bytes, PageTier]]:
        """Names of the pages to read, and from where."""
        for tier, moves in zip(PAGE_TIERS, (self.host, self.disk), strict=True):
            for copy in moves.fetch:
                yield copy.name, tier


NO_PAGE_MOVES = PageMoves()


Memory = Literal["weights", "kv_cache"]
"""What a sleeping model gives back: its weights; its KV pages and states."""
MEMORY: tuple[Memory, ...] = get_args(Memory)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the model's weights, made before anything else of the step.

    load adapter: from `folder`, as number `adapter`. drop adapter: no request and no encoding names
    its number any more. weights: all of the model's, from `folder`; nothing else is computed.
    adapt: no weights, but the vision tower's graphs, to the traffic; no request is alive.
    sleep, wake: give `memory` back, and take it again; in between nothing is computed. Weights are
    read again; with `lightly` those stay that lie in host memory. may sleep: only the reason
    against.
    """

    kind: Literal["load adapter", "drop adapter", "weights", "adapt", "may sleep", "sleep", "wake"]
    adapter: int = 0
    folder: str = ""
    memory: tuple[Memory, ...] = ()
    lightly: bool = False


ADAPT = Change("adapt")


@dataclass(frozen=True, slots=True)
class Changed:
    """The outcome of a change. error: the reason against, in words; "": the change was made.

    fingerprint: of the loaded weights. tower: the vision tower is concerned. rank: of an adapter,
    the largest. nbytes: bytes on the device, of this rank. asleep: memory given back.
    """

    error: str = ""
    fingerprint: str = ""
    tower: bool = False
    rank: int = 0
    nbytes: int = 0
    asleep: tuple[Memory, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, executed in this order: change, close, open, pages, moves, restore, encode, one
    forward over `rows`, snapshot, deliver, save.

    Batch rows are the concatenation of `rows` in order: decoding rows first, then prefill chunks.
    tower: patch-blocks (patches x blocks of the vision tower) that the step may spend on unfinished
    encodings, in order of their begin; 0: no bound; `TOWER_RESTS`: none. save: embeddings on the
    device to write to disk, in the background, once encoded. restore: states from which slots go
    on. snapshot: states of slots to keep, as the step's rows leave them. wait: nothing is left to
    do before a read from disk or an encoding ends: wait for either. An adapting plan has no other
    content.
    """

    # the arena
    step: int
    close: tuple[int, ...] = ()
    open: tuple[Open, ...] = ()
    moves: tuple[Move, ...] = ()
    # images
    encode: tuple[Encode, ...] = ()
    tower: int = 0
    save: tuple[ImageKey, ...] = ()
    deliver: tuple[Deliver, ...] = ()
    # tokens
    rows: tuple[Row, ...] = ()
    splices: tuple[Splice, ...] = ()
    # states
    restore: tuple[StateCopy, ...] = ()
    snapshot: tuple[StateCopy, ...] = ()
    # the rest of the worker
    wait: bool = False
    pages: PageMoves = NO_PAGE_MOVES
    change: Change | None = None

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def images(self) -> bool:
        """True if the step begins some work on images."""
        return bool(self.moves or self.encode or self.save or self.deliver or self.adapt)

    @property
    def patches(self) -> int:
        """To be run through the vision tower."""
        return sum(encode.patches for encode in self.encode if not encode.given)

    @property
    def empty(self) -> bool:
        """True if the step does nothing. A plan that only continues the tower is not empty."""
        work = self.close or self.open or self.moves or self.encode or self.rows
        beside = self.tower or self.save or self.deliver or self.pages or self.change
        return not (work or beside or self.wait)

    @property
    def adapt(self) -> bool:
        return self.change == ADAPT


MOST_COMPARED = 16
"""Lines of masks that a row is compared with: about a microsecond for each that is alike."""


@dataclass(frozen=True, slots=True)
class Masks:
    """The allowed tokens of a plan's masked rows, once the tokens of the step before are known;
    only for the sampling rank.

    words: int32 [L, ceil(V / 32)] as bytes; token t is bit t % 32 of word t // 32. lines: the line
    of each row with `masked`, in row order; equal rows, common within texts, share a line, as lines
    are long (19 KB for V = 152,064).
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


Happened = Literal["read", "not read", "damaged", "missing", "not saved"]
"""What became of a file. not read, damaged, missing: it counts as gone; it is there again once it
has been made and saved again.
"""
DiskEvent = tuple[ImageKey, Happened]
"""Of an embedding."""
PageOutcome = Happened | Literal["saved", "late", "slow"]
"""late, slow: computed, for reading took, or would have taken, longer."""
PAGE_OUTCOMES: tuple[PageOutcome, ...] = (*get_args(Happened), "saved", "late", "slow")
PageEvent = tuple[bytes, Happened, PageTier]
"""Of a KV page, or a state, by name."""


@dataclass(frozen=True, slots=True)
class HeadGuesses:
    """Guesses by the model's head of a sequence's tokens from `place` on."""

    place: int
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to the plan of `step`: one token per row with `sample`, in row order.
    `logprobs`: where they are asked for, with the place of the token in `tokens`. `scores`,
    `readouts`: what rows with extras asked for, with the row's place in the plan.

    `encoded`: images encoded since the last step, with the milliseconds (of the whole pack, shared
    by patches) and the end time (`time.monotonic()`, common to all processes of a machine). Their
    pixels have been read; later plans may show only encoded images. `disk`: reads and writes
    finished since the last step; `pages`: the same of KV pages. `unfinished`: more graphs are left
    to adapt. `broken`: indices of rows with values that are no numbers: their tokens and KV mean
    nothing. `failed`: images not encoded, with the reason ("": the device has no memory left);
    their pixels are not read any more. `exhausted`: the device had no memory for the plan's rows,
    and none was computed. `changed`: what came of the plan's change, if it has one. `guesses`: one
    per row with `guess`, in row order.
    """

    step: int
    # of rows
    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    scores: tuple[tuple[int, PromptScores], ...] = ()
    readouts: tuple[tuple[int, Readout], ...] = ()
    guesses: tuple[HeadGuesses, ...] = ()
    broken: tuple[int, ...] = ()
    exhausted: bool = False
    # of images
    encoded: tuple[tuple[ImageKey, float, float], ...] = ()
    failed: tuple[tuple[ImageKey, str], ...] = ()
    # of what was done beside them
    disk: tuple[DiskEvent, ...] = ()
    pages: tuple[PageEvent, ...] = ()
    unfinished: bool = False
    changed: Changed | None = None
