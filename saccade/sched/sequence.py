"""One request on its way through the engine.

Owns a sequence's state and its legal transitions. Only the scheduler changes a sequence.

    waiting --admit--> running --finish--> finished        `finish` is legal from waiting too
       ^------preempt-----'
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from saccade.cache.content import Content
from saccade.cache.prefix import Node
from saccade.core.types import (
    CacheMiss,
    CacheReport,
    Caching,
    Image,
    ImageKey,
    ImageOutcome,
    Missed,
    Request,
)
from saccade.sched.grammar_state import GrammarState

Source = Literal["none", "pixels", "encoder"]
"""What an image was encoded from, as `ImageOutcome.level` calls it."""


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Save:
    """The state after `tokens` tokens is in `line`, or on its way there."""

    tokens: int
    line: int


@dataclass(slots=True)
class RunStates:
    """Snapshots of one stay in a slot. points: of its prompt. planned: by plans in flight, in
    order. newest: of its answer. hidden: taken, but a duplicate hides their page until the run
    ends.
    """

    points: tuple[int, ...]
    planned: list[Save] = field(default_factory=list)
    newest: Save | None = None
    hidden: list[Save] = field(default_factory=list)

    @property
    def lines(self) -> list[int]:
        """What the cache does not hold yet."""
        newest = [self.newest] if self.newest else []
        return [save.line for save in (*self.planned, *newest, *self.hidden)]


@dataclass(slots=True, eq=False)
class Run:
    """One stay of a sequence in a slot, from its admission to its preemption or its end.

    node: the last page held in the prefix cache. announced: how many of `pages` the workers know.
    computed: tokens `[0, computed)` have valid KV, as results have told. planned: as far as the
    plans in flight go. drawing: tokens that they draw and that are not known; skips: rows of theirs
    that draw a token that is known. opened: tokens that the worker was told when the slot was
    opened; drawn: the place of the last token that a row draws. pins: embeddings kept for this
    sequence. marks: breakpoints that lie before `computed`. states: of a model that keeps a
    state per sequence, its snapshots.
    """

    slot: int
    node: Node | None
    pages: list[int]
    announced: int
    computed: int
    planned: int
    opened: int
    drawing: int = 0
    skips: int = 0
    drawn: int = -1
    pins: set[ImageKey] = field(default_factory=set)
    marks: int = 0
    states: RunStates | None = None


@dataclass(slots=True)
class Account:
    """What the prefix cache had of a prompt, and what it keeps.

    cached: prompt tokens found at the first admission; None before. admitted: when that was
    (`time.monotonic()`); 0.0 before. kept: tokens up to which breakpoints keep it. written: of
    these, tokens that were computed, by the seconds they are kept. missed: why less was found than
    might have been, if that was asked.
    """

    cached: int | None = None
    admitted: float = 0.0
    kept: int = 0
    written: Counter[int] = field(default_factory=Counter)
    missed: CacheMiss | None = None

    def report(self, caching: Caching) -> CacheReport | None:
        """What the front hears; None where nothing was asked."""
        if not (caching.breakpoints or caching.diagnose):
            return None
        return CacheReport(tuple(sorted(self.written.items())), self.missed)


class Sequence:
    """A request, the tokens of its answer so far, and, while it is running, its `run`.

    order: place of arrival. last_use: per image, the token after its last span; once that is
    computed the image is not needed again.
    matched: tokens found in the prefix cache when this was last looked up, while it waits.
    blocked: the image that a waiting sequence waits for. cramped: the device had no room for its
    next image beside those that are there: any step is better than none.
    encoded: images encoded on behalf of this sequence: why they were missing, and from what.
    found: where each image was found, by its index, so far as that is known.
    scored: the first prompt token that is still to be scored, or read, as results have told; all
    of them count as such where nobody asked.
    guide: what the answer may be; None: any text. told: tokens of the answer that deltas have told;
    None before the first delta.
    """

    __slots__ = (
        "account",
        "blocked",
        "content",
        "cramped",
        "encoded",
        "found",
        "guide",
        "last_use",
        "matched",
        "order",
        "request",
        "run",
        "scored",
        "state",
        "told",
    )

    def __init__(self, request: Request, order: int, guide: GrammarState | None = None) -> None:
        self.request = request
        self.guide = guide
        self.order = order
        self.content = Content(
            list(request.tokens), request.spans, request.images, request.cache_salt
        )
        self.state = State.WAITING
        self.run: Run | None = None
        self.last_use = {request.images[span.image].key: span.end for span in request.spans}
        self.matched: int | None = None
        self.blocked: ImageKey | None = None
        self.cramped = False
        self.encoded: dict[ImageKey, tuple[Missed, Source]] = {}
        self.found: dict[int, ImageOutcome] = {}
        self.account = Account()
        self.told: int | None = None
        self.scored = len(request.tokens)
        if request.prompt_logprobs is not None:
            self.scored = 1  # nothing stands before the first
        elif request.reading is not None:
            self.scored = max(0, len(request.tokens) - request.reading.last)

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def group(self) -> str:
        """Answers of one HTTP request; a request without a group is one of its own."""
        return self.request.group or self.request.id

    @property
    def cached(self) -> int | None:
        """Prompt tokens found in the prefix cache at the first admission; None before."""
        return self.account.cached

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self.content.tokens

    @property
    def prompt_length(self) -> int:
        return len(self.request.tokens)

    @property
    def output_length(self) -> int:
        return len(self.content.tokens) - len(self.request.tokens)

    @property
    def length(self) -> int:
        """Tokens, those that plans in flight draw included."""
        return len(self.content.tokens) + (self.run.drawing if self.run else 0)

    @property
    def computed(self) -> int:
        return self.run.computed if self.run else 0

    @property
    def position(self) -> int:
        """The first token that is still to be planned, as far as is known."""
        return self.run.planned if self.run else self.matched or 0

    @property
    def decoding(self) -> bool:
        """The next row is one answer token, which a row before has drawn."""
        run = self.run
        return run is not None and run.drawn == run.planned == self.length - 1

    @property
    def untold(self) -> tuple[int, ...]:
        """Tokens of the answer that no delta has told."""
        return tuple(self.tokens[self.prompt_length + (self.told or 0) :])

    @property
    def images_end(self) -> int:
        """The token after the last image."""
        spans = self.request.spans
        return spans[-1].end if spans else 0

    @property
    def shareable(self) -> int:
        """Tokens that may come from the prefix cache: no score and no state comes from there."""
        if self.scored >= self.prompt_length:
            return len(self.content.tokens)
        return self.scored - (self.request.reading is None)

    def to_score(self, start: int, end: int) -> tuple[int, int] | None:
        """The prompt tokens [first, end) that a row of tokens [start, end) is to score, if any."""
        if self.request.reading is not None:
            return None
        first, last = max(start + 1, self.scored), min(end + 1, self.prompt_length)
        return (first, last) if first < last else None

    def to_read(self, start: int, end: int) -> int:
        """How many of the tokens [start, end) of a row, its last ones, are to be read."""
        return 0 if self.request.reading is None else max(0, end - max(start, self.scored))

    def may_draw(self, token_limit: int) -> bool:
        """Whether a token more than plans in flight draw may be planned: the answer has room for
        it, and its mask is there, or will be in time. Of one that draws nothing: always.
        """
        if self.request.reading is not None:
            return True
        guide = self.guide
        if guide is not None and not (
            guide.quick if self.length > len(self.tokens) else guide.ready
        ):
            return False
        most = self.prompt_length + self.request.sampling.max_tokens
        return self.length < min(most, token_limit)

    def needs(self, key: ImageKey) -> bool:
        """Whether tokens that are not yet known to be computed show this image."""
        return self.computed < self.last_use.get(key, 0)

    def upcoming(self, end: int) -> Iterator[tuple[int, Image]]:
        """(first token, image) of images from `position` to `end`, in order, each once."""
        start = self.position
        if start >= self.images_end:
            return
        seen = set()
        for span in self.request.spans:
            image = self.request.images[span.image]
            if span.end <= start or image.key in seen:
                continue
            if span.start >= end:
                return
            seen.add(image.key)
            yield span.start, image

    def outcomes(self) -> tuple[ImageOutcome, ...]:
        """Where each image was found, so far as that is known."""
        return tuple(self.found[image] for image in sorted(self.found))

    def admit(self, slot: int, node: Node | None, pages: list[int], computed: int) -> Run:
        """waiting -> running, with `pages` of the prefix cache that hold the first `computed`
        tokens.
        """
        assert self.state is State.WAITING and computed < len(self.tokens)
        self.state = State.RUNNING
        self.run = Run(slot, node, pages, len(pages), computed, computed, len(self.tokens))
        self.blocked, self.cramped = None, False
        if self.account.cached is None:
            self.account.cached = min(computed, self.prompt_length)
            self.account.admitted = time.monotonic()
        last = {span.image: span.end for span in self.request.spans}
        for image, end in last.items():
            if end <= computed and image not in self.found:
                self.found[image] = ImageOutcome(image, "kv")
        return self.run

    def preempt(self) -> None:
        """running -> waiting: everything is to be computed again.

        The scheduler has taken pages and pins back.
        """
        assert self.state is State.RUNNING
        self.state, self.run, self.matched = State.WAITING, None, None

    def finish(self) -> None:
        """Any state but finished -> finished."""
        assert self.state is not State.FINISHED
        self.state, self.run = State.FINISHED, None
