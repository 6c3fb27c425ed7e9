"""The messages from the scheduler to the workers: one immutable `Plan` per step, and the `Masks` of
its rows under a grammar.

Ranks never decide: a plan specifies everything that a rank does in a step. A worker keeps, per
slot, the content of `Open` and the tokens sampled since. So a plan names positions, and token
values only if a grammar forced them. Two plans may be in flight: step n+1 is planned and sent while
step n is computed, and a `StepResult` answers each, in order. A plan may hold several steps, where
rows only decode and there is no other work. `CancelSteps` ends it early.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    PooledOutput,
    PromptScores,
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
    """The place for an image's canvas, uint8 RGB [height, width, 3], in the shared arena.

    `offset` is in bytes. `embedding_bytes`: bytes from `offset` on for an embedding from another
    server instead; 0: only pixels.
    """

    offset: int
    height: int
    width: int
    embedding_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.height * self.width * 3


@dataclass(frozen=True, slots=True)
class Open:
    """A sequence enters `slot`.

    `tokens` are the prompt and, after a preemption, the answer so far; the first `prompt_length`
    are the prompt. `pages` already hold KV for the first `len(pages) * page_size` tokens (the
    cached prefix). `rules`: as in `Request`, if any. `adapter`: its number.
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
    """Score the prompt's tokens [first, end), each following a token in the row.

    Name the `top` likeliest beside each.
    """

    first: int
    end: int
    top: int


class ReadRun(msgspec.Struct, frozen=True, tag="read"):
    """Read the row's last `count` tokens.

    Gives the logits of `labels`, or the state where `labels` is empty.
    """

    count: int
    labels: tuple[int, ...]


RowExtra = ScoreRun | ReadRun
"""What a row may be asked for beside its token. Structs, for their tags tell them apart."""


@dataclass(frozen=True, slots=True)
class Row:
    """Compute tokens `[start, start + length)` in `slot`, after appending `pages` to its page
    table.

    `sample`: sample the next token. `masked`: the allowed tokens follow in `Masks`, once the tokens
    from the step before are known; the worker waits for the mask before sampling, but computes
    before. `tokens`: the row's last tokens, unless `Open` or a step has sent them. `draft`: its one
    token is a draft for what an earlier row in the step draws; the row counts only if that is what
    was drawn. `keep`: the state memory line that gets the sequence's state after the row, for
    models with states; `NO_LINE`: only the slot's own. head_drafts: how many tokens the model's MTP
    head drafts after the one drawn, by this row or by the last accepted draft behind it. `extras`:
    what else is asked for.
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
    head_drafts: int = 0
    extras: tuple[RowExtra, ...] = ()


def following(row: Row) -> Row:
    """Return the row for the token that a decoding row draws, on pages that the workers know."""
    return Row(row.slot, row.start + 1, 1, (), sample=True)


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
class TileCopy:
    """Tile `tile` of an image to encode has the same rows as tile `place` of `key`.

    That is the image itself, or one whose embedding is on the device or on the host when the step
    begins, before its moves. grid: that image's.
    """

    tile: int
    key: ImageKey
    grid: Grid
    place: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Begin to run the vision encoder on one image.

    Encoding may take several steps. Once `StepResult.encoded` names `key`, the embedding is on the
    device under `key` until moved.

    Until then `pixels` stays unwritten otherwise, and every plan leaves the image out.
    """

    key: ImageKey
    grid: Grid
    patches: int
    pixels: PixelSlot
    # tokens in an embedding from another server, stored instead of the pixels; this step loads
    # the embedding without encoding; 0: pixels
    given: int = 0
    adapter: int = 0  # number of the one that the tower has meanwhile, 0 without one
    idle: bool = False  # no request waits for it, so others go first
    # tiles that need no tower. `patches` are the others', and at least 1.
    copies: tuple[TileCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class Deliver:
    """Copy the embedding of `key` from the device into the arena at `offset`, within the step."""

    key: ImageKey
    num_tokens: int
    offset: int


@dataclass(frozen=True, slots=True)
class Splice:
    """Batch rows `[row, row + length)` come from the embedding of `key`.

    They are its rows `[offset, offset + length)`, instead of the token table's.
    """

    row: int
    length: int
    key: ImageKey
    offset: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy a sequence's state, for models with states (`family.KVSpec`).

    Copies line `source` in the workers' state memory to line `target`. The first lines are the
    slots, then the snapshots, then the slots for states between draft tokens.
    """

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The KV page called `name`, and the pool's page for the content.

    With `state`, the named state, and its line in the state memory.
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
    """KV pages between the device and one tier, in this order."""

    drop: tuple[bytes, ...] = ()  # remove from the tier
    # begin to write the page's present content, before anything else in the step
    save: tuple[PageCopy, ...] = ()
    forget: tuple[bytes, ...] = ()  # drop the read that an earlier plan began, ended or not
    # start to read; `StepResult.pages` reports the outcome. The page stays untouched until the read
    # content is placed or forgotten.
    fetch: tuple[PageCopy, ...] = ()
    place: tuple[PageCopy, ...] = ()  # the page has the read content from now on

    def __bool__(self) -> bool:
        return bool(self.save or self.drop or self.fetch or self.forget or self.place)


PageMoves = tuple[tuple[PageTier, TierMoves], ...]
"""KV pages between the device and each tier that has moves. Those of a tier that drop, save and
forget come before any other tier's that fetch and place.
"""


Memory = Literal["weights", "kv_cache"]
"""What a sleeping model gives back: its weights; its KV pages and states."""
MEMORY: tuple[Memory, ...] = get_args(Memory)


@dataclass(frozen=True, slots=True)
class Change:
    """A change to the model's weights, made before anything else in the step.

    load adapter: from `folder`, as number `adapter`. drop adapter: all requests and encodings are
    done with its number. weights: all of the model's, from `folder`; the step computes only this.
    adapt: fit the vision encoder's graphs to the traffic, while all requests are done; weights
    stay. sleep, wake: release `memory`, and allocate it again; nothing is computed in between.
    Weights are read again; with `lightly` those in host memory are kept. may sleep: only the reason
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
    """A change's outcome."""

    error: str = ""  # the reason against, in words; "": the change was made
    fingerprint: str = ""  # identifies the loaded weights
    tower: bool = False  # the vision encoder is concerned
    rank: int = 0  # an adapter's largest rank
    nbytes: int = 0  # bytes on the device, on this rank
    asleep: tuple[Memory, ...] = ()  # memory released


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Unused memory to return to the system: freed blocks, and KV pages.

    `pages`: runs (first page, pages).
    """

    pages: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, executed in this order: change, close, open, pages, moves, restore, encode, one
    forward over `rows`, snapshot, deliver, save, unused.

    Batch rows are the concatenation of `rows` in order: decoding rows first, then prefill chunks.
    """

    # the arena
    step: int
    close: tuple[int, ...] = ()
    open: tuple[Open, ...] = ()
    moves: tuple[Move, ...] = ()
    # images
    encode: tuple[Encode, ...] = ()
    # patch-blocks (patches x vision tower blocks) that the step may spend on unfinished encodings,
    # oldest first; 0: unbounded; `TOWER_RESTS`: the tower rests
    tower: int = 0
    # embeddings on the device to write to disk, in the background, once encoded
    save: tuple[ImageKey, ...] = ()
    deliver: tuple[Deliver, ...] = ()
    # tokens
    rows: tuple[Row, ...] = ()
    splices: tuple[Splice, ...] = ()
    # states
    restore: tuple[StateCopy, ...] = ()  # states from which slots resume
    snapshot: tuple[StateCopy, ...] = ()  # slot states to keep, as the step's rows leave them
    # the rest of the worker
    # all other work waits for a read from disk or an encoding, so wait for either. An adapting plan
    # has only that content.
    wait: bool = False
    pages: PageMoves = ()
    change: Change | None = None
    unused: FreeMemory | None = None
    # further steps, each of which only decodes the token sampled before. 0: a
    # `CancelSteps` arrived, and the rows are not computed.
    steps: int = 1

    @property
    def rest(self) -> Plan:
        """Return the steps after the first, which is all that a worker does at a time."""
        rows = tuple(map(following, self.rows))
        return Plan(self.step + 1, rows=rows, steps=self.steps - 1)

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def images(self) -> bool:
        """Return True if the step begins some work on images."""
        return bool(self.moves or self.encode or self.save or self.deliver or self.adapt)

    @property
    def patches(self) -> int:
        """Count the patches to run through the vision encoder."""
        return sum(encode.patches for encode in self.encode if not encode.given)

    @property
    def empty(self) -> bool:
        """Return True if the step lacks work. A plan that only continues the tower has work."""
        return not (self.planned or self.change)

    @property
    def planned(self) -> bool:
        """Return True if the step has work beside a change."""
        work = self.rows or self.close or self.open or self.moves or self.encode
        beside = self.tower or self.save or self.deliver or self.pages
        return bool(work or beside or self.wait or self.unused)

    @property
    def adapt(self) -> bool:
        return self.change == ADAPT


@dataclass(frozen=True, slots=True)
class CancelSteps:
    """Cancel all plans sent before, as new work has arrived: the step being computed is the last.

    Of later steps, rows stay uncomputed. The first such step of a plan is answered as `skipped`.
    """


MAX_COMPARED = 16
"""Lines of masks that a row is compared with: about a microsecond for each that is alike."""


@dataclass(frozen=True, slots=True)
class Masks:
    """The allowed tokens for a plan's masked rows, once the tokens from the step before are known.

    Only for the sampling rank.
    """

    step: int
    words: bytes  # int32 [L, ceil(V / 32)] as bytes; token t is bit t % 32 in word t // 32
    # the line for each row with `masked`, in row order; equal rows, common within texts, share a
    # line, as lines are long (19 KB for V = 152,064)
    lines: tuple[int, ...]

    @classmethod
    def of(cls, step: int, rows: Sequence[bytes]) -> Masks:
        """Pack the masks for `step`. rows: words [ceil(V / 32)] for each row."""
        kept: list[bytes] = []
        late: list[int] = []  # lines of late, the last first: most rows are like one of these
        lines = []
        for row in rows:
            line = next((line for line in late if kept[line] == row), len(kept))
            if line == len(kept):
                kept.append(row)
            else:
                late.remove(line)
            late = [line, *late[: MAX_COMPARED - 1]]
            lines.append(line)
        return cls(step, b"".join(kept), tuple(lines))

    def rows(self) -> npt.NDArray[np.int32]:
        """Return the masks as [M, ceil(V / 32)], the caller's own."""
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
class HeadDrafts:
    """Draft tokens from the model's MTP head, for a sequence's tokens from `place` on."""

    place: int
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to the plan of `step`: one token per row with `sample`, in row order.

    `logprobs`: where they are asked for, with the token's place in `tokens`. `scores`,
    `pooled_outputs`: what rows with extras asked for, with the row's place in the plan.

    `encoded`: images encoded since the last step, with the milliseconds (for the whole pack, shared
    by patches) and the end time (`time.monotonic()`, common to all processes on a machine). Their
    pixels have been read. Later plans may show only encoded images. `disk`: reads and writes
    finished since the last step. `pages`: the same for KV pages. `unfinished`: more graphs are left
    to adapt. `non_finite`: indices of non-finite rows, whose tokens and KV are meaningless.
    `failed`: images left unencoded, with the reason ("": the device's memory ran out); their pixels
    are free again. `exhausted`: the device lacked memory for the plan's rows, and all stayed
    uncomputed. `changed`: the result of the plan's change, if it has one. `head_drafts`: one per
    row with `head_drafts`, in row order. `skipped`: after a `CancelSteps`, rows stayed uncomputed
    in this step, and in those of the same plan behind it.
    """

    step: int
    # of rows
    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    scores: tuple[tuple[int, PromptScores], ...] = ()
    pooled_outputs: tuple[tuple[int, PooledOutput], ...] = ()
    head_drafts: tuple[HeadDrafts, ...] = ()
    non_finite: tuple[int, ...] = ()
    exhausted: bool = False
    # of images
    encoded: tuple[tuple[ImageKey, float, float], ...] = ()
    failed: tuple[tuple[ImageKey, str], ...] = ()
    # of what was done beside them
    disk: tuple[DiskEvent, ...] = ()
    pages: tuple[PageEvent, ...] = ()
    unfinished: bool = False
    changed: Changed | None = None
    skipped: bool = False
