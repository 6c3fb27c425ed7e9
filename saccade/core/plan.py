"""The messages from the scheduler to the workers: one immutable `Plan` per step, and the `Masks`
for requests with a grammar.

A plan is a scheduler output. It specifies everything that a rank does in a step, so ranks make no
decisions. Workers store, for each slot, the content of `Open` and the tokens sampled since then.
Plans therefore refer to positions, and contain token ids only if a grammar forced them. Two plans
may be in flight: step n+1 is planned and sent while step n is computed. Workers answer each step
with a `StepResult`, in order. A plan that only decodes may cover several steps, of which
`CancelSteps` cancels those that have not started.
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
"""A value of `Plan.tower`: the vision encoder does not run in this step."""

NO_LINE = -1
"""A value of `Row.keep`: the sequence's state is not copied."""

PLANS_IN_FLIGHT = 2
"""Maximum number of plans that are sent before the result of the first one arrives."""


@dataclass(frozen=True, slots=True)
class PixelSlot:
    """The region of the shared arena for one preprocessed image: uint8 RGB [height, width, 3]."""

    offset: int  # in bytes
    height: int
    width: int
    # size of an embedding from another server, stored at `offset` instead of pixels; 0: pixels
    embedding_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.height * self.width * 3


@dataclass(frozen=True, slots=True)
class Open:
    """Start a sequence in `slot`, with its prompt, images and sampling parameters."""

    slot: int
    # the prompt; after a preemption, also the tokens generated so far
    tokens: tuple[int, ...]
    prompt_length: int
    spans: tuple[Span, ...]
    images: tuple[Image, ...]
    sampling: SamplingParams
    # the cached prefix: KV pages that hold the first `len(pages) * page_size` tokens
    pages: tuple[int, ...]
    rules: TokenRules | None = None  # `Request.rules`, if any
    adapter: int = 0  # `AdapterRef.number`


class ScoreRun(msgspec.Struct, frozen=True, tag="score"):
    """Return log-probabilities of the prompt tokens with indices [first, end), which all follow a
    token in the row.

    top: how many of the likeliest tokens to return for each of them.
    """

    first: int
    end: int
    top: int


class ReadRun(msgspec.Struct, frozen=True, tag="read"):
    """Return values computed from the last `count` tokens of the row.

    They are the logits of the tokens `labels`, or the output of `FamilyNet.readout` if `labels` is
    empty.
    """

    count: int
    labels: tuple[int, ...]


RowExtra = ScoreRun | ReadRun
"""A request for output in addition to the row's sampled token. These are msgspec structs because a
union of types needs tags.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Compute tokens `[start, start + length)` of the sequence in `slot`."""

    slot: int
    start: int
    length: int
    pages: tuple[int, ...]  # appended to the slot's page table first
    sample: bool  # sample the next token
    # A grammar constrains the sampled token. `Masks` follows once the previous step's tokens are
    # known. The worker computes logits without it, but waits for it before sampling.
    masked: bool = False
    tokens: tuple[int, ...] = ()  # the row's last tokens, if the worker does not have them yet
    # The row's single token is a draft for the token that an earlier row of this step samples. The
    # row is ignored unless both tokens are equal.
    draft: bool = False
    # index in state memory that receives a copy of the sequence's state after this row, for models
    # with states; `NO_LINE`: no copy
    keep: int = NO_LINE
    # how many tokens the model's MTP head drafts after the token sampled by this row, or after the
    # last accepted draft that follows it
    head_drafts: int = 0
    extras: tuple[RowExtra, ...] = ()


def following(row: Row) -> Row:
    """Return the row that decodes the token sampled by `row`, without new KV pages."""
    return Row(row.slot, row.start + 1, 1, (), sample=True)


Place = Literal["device", "host", "staged", "disk"]
"""Where an embedding is stored. staged: in host memory after a read from disk, until it is copied
to the device.
"""


@dataclass(frozen=True, slots=True)
class Move:
    """Move the embedding of `key` from the tier `source` to `target`, or drop it from `source` if
    `target` is None.

    device <-> host, staged -> device: the embedding is removed from `source`. disk -> staged: the
    embedding also stays on disk. It is read in the background, and `StepResult.disk` reports the
    outcome.
    """

    key: ImageKey
    source: Place
    target: Place | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TileCopy:
    """While an image is encoded, copy its tile `tile` from an embedding that is already computed
    instead of encoding it.

    The source is tile `place` of image `key`, whose grid is `grid`. It is the image itself, or an
    image whose embedding is on the device or on the host when the step starts, before its moves.
    """

    tile: int
    key: ImageKey
    grid: Grid
    place: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Start to encode one image, which may take several steps.

    Once `StepResult.encoded` contains `key`, its embedding is on the device. Until then the pixels
    must not be overwritten, and no plan may use the embedding.
    """

    key: ImageKey
    grid: Grid
    patches: int
    pixels: PixelSlot
    # rows of an embedding from another server, which is stored instead of the pixels and is loaded
    # in this step without encoding; 0: encode pixels
    given: int = 0
    adapter: int = 0  # number of the adapter that the vision encoder uses; 0: none
    idle: bool = False  # no request waits for it, so other images are encoded first
    # tiles that need not be encoded. `patches` counts the patches of the other tiles, and is at
    # least 1.
    copies: tuple[TileCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class Deliver:
    """Copy the embedding of `key` from the device to the arena at `offset`, which is in bytes,
    before the step ends.
    """

    key: ImageKey
    num_tokens: int
    offset: int


@dataclass(frozen=True, slots=True)
class Splice:
    """Use rows `[offset, offset + length)` of the embedding of `key` as the input of batch rows
    `[row, row + length)`, instead of rows of the token embedding table.
    """

    row: int
    length: int
    key: ImageKey
    offset: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy a sequence's recurrent state from row `source` to row `target` of the workers' state
    memory (`family.KVSpec`).

    The rows of the memory are the states of the slots, then snapshots, then states after draft
    tokens.
    """

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A KV page to copy to or from a tier. name: the key of its content. place: its index on the
    device.
    """

    name: bytes
    place: int
    state: bool = False  # if True: the key of a state snapshot, and its row in state memory


PageTier = Literal["host", "disk"]
"""A cache tier for KV pages in addition to the device."""
PAGE_TIERS: tuple[PageTier, ...] = get_args(PageTier)
"""All values of `PageTier`, the fastest tier first."""


@dataclass(frozen=True, slots=True)
class TierMoves:
    """Transfers of KV pages between the device and one tier, executed in the order of the
    fields.
    """

    drop: tuple[bytes, ...] = ()  # remove from the tier
    # start to write the page's present content, before anything else in the step
    save: tuple[PageCopy, ...] = ()
    forget: tuple[bytes, ...] = ()  # drop the read that an earlier plan started, finished or not
    # Start to read. `StepResult.pages` reports the outcome. The pool's page does not change until
    # `place` copies the data to it.
    fetch: tuple[PageCopy, ...] = ()
    place: tuple[PageCopy, ...] = ()  # copy the data read to the page

    def __bool__(self) -> bool:
        return bool(self.save or self.drop or self.fetch or self.forget or self.place)


PageMoves = tuple[tuple[PageTier, TierMoves], ...]
"""The transfers of each tier that has any. The `drop`, `save` and `forget` of all tiers are
executed before the `fetch` and `place` of any tier.
"""


Memory = Literal["weights", "kv_cache"]
"""Memory that the engine can release while it sleeps: the weights, or KV pages and recurrent
states.
"""
MEMORY: tuple[Memory, ...] = get_args(Memory)


@dataclass(frozen=True, slots=True)
class Change:
    """A change to the model's weights or memory, made before all other work of the step.

    load adapter: load the adapter in `folder` as number `adapter`.
    drop adapter: unload the adapter with number `adapter`, which no request or encoding uses.
    weights: replace the model's weights with those in `folder`. The step computes nothing else.
    adapt: capture a deferred CUDA graph, or recapture those of the vision encoder for the sizes of
    recent images. No request is running.
    may sleep: change nothing. The result has an error if the model cannot sleep.
    sleep: release `memory`. With `lightly`, weights are released only if they are on a GPU.
    wake: allocate `memory` again, and load the weights.
    """

    kind: Literal["load adapter", "drop adapter", "weights", "adapt", "may sleep", "sleep", "wake"]
    adapter: int = 0
    folder: str = ""
    memory: tuple[Memory, ...] = ()
    lightly: bool = False


ADAPT = Change("adapt")


@dataclass(frozen=True, slots=True)
class Changed:
    """The result of a `Change` on one rank."""

    error: str = ""  # why it was not made; "": it was made
    fingerprint: str = ""  # identifies the loaded weights
    tower: bool = False  # it changed the vision encoder
    rank: int = 0  # the adapter's largest rank
    nbytes: int = 0  # bytes on the device, on this rank
    asleep: tuple[Memory, ...] = ()  # memory that is now released


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Return unused memory to the operating system: freed heap memory, and the memory of the KV
    pages in `pages`.
    """

    pages: tuple[tuple[int, int], ...] = ()  # ranges: (first page, number of pages)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step of the engine, executed in this order: change, close, open, pages, moves, restore,
    encode, one forward pass over `rows`, snapshot, deliver, save, unused.

    The batch of the forward pass is the concatenation of `rows`: first decoding rows, then prefill
    chunks.
    """

    # sequences and embeddings
    step: int
    close: tuple[int, ...] = ()
    open: tuple[Open, ...] = ()
    moves: tuple[Move, ...] = ()
    # images
    encode: tuple[Encode, ...] = ()
    # Budget for unfinished encodings in this step, in patches times blocks of the vision encoder.
    # The oldest are encoded first. 0: unlimited; `TOWER_RESTS`: none.
    tower: int = 0
    # embeddings to write from the device to disk in the background, once they are encoded
    save: tuple[ImageKey, ...] = ()
    deliver: tuple[Deliver, ...] = ()
    # tokens
    rows: tuple[Row, ...] = ()
    splices: tuple[Splice, ...] = ()
    # states
    restore: tuple[StateCopy, ...] = ()  # load slots' states before the forward pass
    snapshot: tuple[StateCopy, ...] = ()  # save slots' states after it
    # other work
    # Block until a read from disk or an encoding finishes, because no other work can proceed. A
    # plan with `adapt` contains nothing else.
    wait: bool = False
    pages: PageMoves = ()
    change: Change | None = None
    unused: FreeMemory | None = None
    # Steps that the plan covers. Each after the first decodes the token sampled before it.
    # 0: the plan was cancelled, and its rows are not computed.
    steps: int = 1

    @property
    def rest(self) -> Plan:
        """The plan for all steps except the first. Workers execute one step at a time."""
        rows = tuple(map(following, self.rows))
        return Plan(self.step + 1, rows=rows, steps=self.steps - 1)

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def images(self) -> bool:
        """True if the step starts work on images, or is an `adapt` change."""
        return bool(self.moves or self.encode or self.save or self.deliver or self.adapt)

    @property
    def patches(self) -> int:
        """The number of patches that go through the vision encoder. Embeddings from other servers
        have none.
        """
        return sum(encode.patches for encode in self.encode if not encode.given)

    @property
    def empty(self) -> bool:
        """True if the step has no work at all. Continuing to encode images counts as work."""
        return not (self.planned or self.change)

    @property
    def planned(self) -> bool:
        """True if the step has any work besides `change`."""
        work = self.rows or self.close or self.open or self.moves or self.encode
        beside = self.tower or self.save or self.deliver or self.pages
        return bool(work or beside or self.wait or self.unused)

    @property
    def adapt(self) -> bool:
        return self.change == ADAPT


@dataclass(frozen=True, slots=True)
class CancelSteps:
    """Cancel all steps of earlier plans that have not started, because new work has arrived.

    Their rows are not computed. For each plan, the result of its first cancelled step has `skipped`
    set.
    """


MAX_COMPARED = 16
"""How many recent masks each new mask is compared with, to send equal masks once. Comparing equal
masks takes about a microsecond.
"""


@dataclass(frozen=True, slots=True)
class Masks:
    """Bit masks of the tokens that grammars allow, for the rows of a plan with `masked`. Sent only
    to the rank that samples.

    They are sent after the plan, once the tokens of the previous step are known.
    """

    step: int
    words: bytes  # int32 [L, ceil(V / 32)]; token t is bit t % 32 of word t // 32
    # index in `words` for each row with `masked`, in order. Equal masks are common and stored once,
    # because a mask is large (19 KB for V = 152,064).
    lines: tuple[int, ...]

    @classmethod
    def of(cls, step: int, rows: Sequence[bytes]) -> Masks:
        """Pack the masks for step `step`, and store equal ones once.

        rows: one mask for each row with `masked`, int32 [ceil(V / 32)] as bytes.
        """
        kept: list[bytes] = []
        late: list[int] = []  # recently used indices, because most masks repeat one of them
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
        """Unpack the masks to a new array, int32 [M, ceil(V / 32)], with a mask for each row with
        `masked`.
        """
        count = max(self.lines) + 1
        return np.frombuffer(self.words, np.int32).reshape(count, -1)[list(self.lines)]


Happened = Literal["read", "not read", "damaged", "missing", "not saved"]
"""The outcome of reading or writing a file. After "not read", "damaged" or "missing", its content
is removed from the cache's index until it is computed and saved again.
"""
DiskEvent = tuple[ImageKey, Happened]
"""An image key, and the outcome of reading or writing its embedding."""
PageOutcome = Happened | Literal["saved", "late", "slow"]
"""The outcome of reading or writing a KV page. late, slow: the page was computed instead, because
the read took too long, or would have.
"""
PAGE_OUTCOMES: tuple[PageOutcome, ...] = (*get_args(Happened), "saved", "late", "slow")
PageEvent = tuple[bytes, Happened, PageTier]
"""The key of a KV page or state snapshot, the outcome of reading or writing it, and its tier."""


@dataclass(frozen=True, slots=True)
class HeadDrafts:
    """Draft tokens from the model's MTP head for one sequence, starting at position `place`."""

    place: int
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of step `step`.

    Row indices refer to the plan's rows, or to the rows of `Plan.rest` for later steps of the plan.
    """

    step: int
    # rows
    tokens: tuple[int, ...] = ()  # one per row with `sample`, in order
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # (index in `tokens`, values) if requested
    scores: tuple[tuple[int, PromptScores], ...] = ()  # (row, values) per `ScoreRun`
    pooled_outputs: tuple[tuple[int, PooledOutput], ...] = ()  # (row, values) per `ReadRun`
    head_drafts: tuple[HeadDrafts, ...] = ()  # one per row with `head_drafts`, in order
    non_finite: tuple[int, ...] = ()  # rows with NaN or inf, whose tokens and KV are invalid
    exhausted: bool = False  # out of device memory: none of the rows was computed
    # images
    # (image, milliseconds, `time.monotonic()` at the end), for images encoded since the last step.
    # The time of a batch is divided among its images by patches. Their pixels are no longer needed.
    encoded: tuple[tuple[ImageKey, float, float], ...] = ()
    # images that failed, with the reason ("": out of device memory); their pixels are not needed
    failed: tuple[tuple[ImageKey, str], ...] = ()
    # in the background
    disk: tuple[DiskEvent, ...] = ()  # embeddings read or written since the last step
    pages: tuple[PageEvent, ...] = ()  # KV pages read or written since the last step
    unfinished: bool = False  # more graphs remain to be captured by `adapt`
    changed: Changed | None = None  # the outcome of the plan's change
    skipped: bool = False  # this and the plan's later steps were cancelled by `CancelSteps`
