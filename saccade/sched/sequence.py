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
from saccade.core.plan import PageTier, ReadRun, RowExtra, ScoreRun
from saccade.core.types import (
    CacheMiss,
    CacheReport,
    Caching,
    GuessSource,
    Image,
    ImageKey,
    ImageOutcome,
    Missed,
    Request,
)
from saccade.sched.grammar_state import GrammarState
from saccade.sched.speculation import Speculation

Source = Literal["none", "pixels", "encoder"]
"""What an image was encoded from, as `ImageOutcome.level` calls it."""


class State(Enum):
    """The stage of a sequence's life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Save:
    """A snapshot: the state after `tokens` tokens is in `line`, or on its way."""

    tokens: int
    line: int


@dataclass(slots=True)
class RunStates:
    """Snapshots of one stay in a slot. points: places in the prompt. planned: by plans in flight,
    in order. newest: the answer's latest. hidden: taken, but a duplicate hides their page until the
    run ends.
    """

    points: tuple[int, ...]
    planned: list[Save] = field(default_factory=list)
    newest: Save | None = None
    hidden: list[Save] = field(default_factory=list)

    @property
    def lines(self) -> list[int]:
        """The rest, not yet held by the cache."""
        newest = [self.newest] if self.newest else []
        return [save.line for save in (*self.planned, *newest, *self.hidden)]


@dataclass(slots=True, eq=False)
class Run:
    """One stay of a sequence in a slot, from its admission to its preemption or its end.

    node: the last page held in the prefix cache. announced: number of `pages` known to the workers.
    computed: tokens `[0, computed)` have valid KV, by the results so far. planned: the end of the
    tokens planned so far. drawing: unknown tokens that plans in flight sample. opened: tokens sent
    to the worker when the slot was opened; drawn: the place of the last token sampled by a row.
    pins: embeddings kept for this sequence. marks:
    breakpoints before `computed`. states: the sequence's snapshots, for a model with per-sequence
    states. speculation: its guesses.
    """

    # its places
    slot: int
    node: Node | None
    pages: list[int]
    announced: int
    # how far it is
    computed: int
    planned: int
    opened: int
    drawing: int = 0
    # what it keeps
    drawn: int = -1
    pins: set[ImageKey] = field(default_factory=set)
    marks: int = 0
    states: RunStates | None = None
    speculation: Speculation = field(default_factory=Speculation)


@dataclass(slots=True)
class Restore:
    """Pages back from other tiers for a waiting sequence. names: of the pages asked for. done: the
    sequence has had its turn. slow: some pages were found, and are computed. start: the first token
    back. tiers: the source, page by page, so far as cached.
    """

    names: list[bytes] = field(default_factory=list)
    done: bool = False
    slow: bool = False
    start: int = 0
    tiers: list[PageTier] = field(default_factory=list)

    def tier(self, token: int, page_size: int) -> PageTier | None:
        """The source of a cached token; None: on the device."""
        page = (token - self.start) // page_size
        return self.tiers[page] if 0 <= page < len(self.tiers) else None

    def tokens(self, cached: int, page_size: int) -> Counter[PageTier]:
        """Of so many cached tokens, those back from other tiers, by tier."""
        found: Counter[PageTier] = Counter()
        for page, tier in enumerate(self.tiers):
            first = self.start + page * page_size
            found[tier] += max(0, min(first + page_size, cached) - first)
        return +found


@dataclass(slots=True)
class Account:
    """The cached and the kept part of a prompt.

    cached: prompt tokens found at the first admission; None before. admitted: time of the first
    admission (`time.monotonic()`); 0.0 before. kept: tokens up to which breakpoints keep the
    prompt. written: newly computed tokens among them, by the seconds they are kept. missed: the
    reason for a shorter prefix than possible, if asked. restore: pages back from other tiers.
    restored: of `cached`, tokens back from other tiers, by tier. guesses: right and
    wrong ones, by source.
    """

    cached: int | None = None
    admitted: float = 0.0
    kept: int = 0
    written: Counter[int] = field(default_factory=Counter)
    missed: CacheMiss | None = None
    restore: Restore = field(default_factory=Restore)
    restored: Counter[PageTier] = field(default_factory=Counter)
    guesses: dict[GuessSource, tuple[int, int]] = field(default_factory=dict)

    def guessed(self, source: GuessSource, right: int = 0, wrong: int = 0) -> None:
        """So many guesses came true, or did not."""
        before = self.guesses.get(source, (0, 0))
        self.guesses[source] = before[0] + right, before[1] + wrong

    def report(self, caching: Caching) -> CacheReport | None:
        """The report for the front; None if the request asked nothing of the caches."""
        if not (caching.breakpoints or caching.diagnose):
            return None
        return CacheReport(tuple(sorted(self.written.items())), self.missed)


class ShownImages:
    """The images of a request by their embeddings' names: the request's own, but for images with
    another's pixels (`same_pixels.py`).

    images: by place. shared: own name -> other. last_use: per image, the token after its last span;
    once that token is computed the image is not needed again.
    """

    __slots__ = ("_request", "images", "last_use", "shared")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.images = list(request.images)
        self.shared: dict[ImageKey, ImageKey] = {}
        self.last_use = {request.images[span.image].key: span.end for span in request.spans}

    def show_as(self, own: ImageKey, image: Image) -> None:
        """From now on `image` serves in place of the request's `own`."""
        self.shared.pop(own, None)
        if image.key != own:
            self.shared[own] = image.key
        for place, each in enumerate(self._request.images):
            if each.key == own:
                self.images[place] = image
        self.last_use = {self.images[span.image].key: span.end for span in self._request.spans}


class Sequence:
    """A request, its answer tokens so far, and, while running, its `run`.

    order: place of arrival. shown: its images. matched: tokens found in the prefix cache at the
    last lookup, while waiting. blocked: the image awaited by a waiting sequence. cramped: the
    device had no room for the next image beside those present: any step is better than none.
    encoded: images encoded on behalf of this sequence: why they were missing, and their source.
    found: source of each image, by its index, as far as known. scored: the first prompt token still
    to be scored or read, by the results so far; all tokens count as such if none is requested.
    guide: the allowed form of the answer; None: any text. told: answer tokens told in deltas; None
    before the first delta.
    """

    __slots__ = (
        "account",
        "blocked",
        "content",
        "cramped",
        "encoded",
        "found",
        "guide",
        "matched",
        "order",
        "request",
        "run",
        "scored",
        "shown",
        "state",
        "told",
    )

    def __init__(self, request: Request, order: int, guide: GrammarState | None = None) -> None:
        self.request = request
        self.guide = guide
        self.order = order
        self.content = Content(
            list(request.tokens),
            request.spans,
            request.images,
            request.cache_salt,
            request.adapter.fingerprint,
        )
        self.state = State.WAITING
        self.run: Run | None = None
        self.shown = ShownImages(request)
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
    def last_use(self) -> dict[ImageKey, int]:
        """As in `ShownImages`."""
        return self.shown.last_use

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def idle(self) -> bool:
        """True if nobody waits for an answer."""
        return self.request.caching.idle

    @property
    def group(self) -> str:
        """The group of answers of one HTTP request; a request without a group is alone in
        its own.
        """
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
        """Number of tokens, including tokens sampled by plans in flight."""
        return len(self.content.tokens) + (self.run.drawing if self.run else 0)

    @property
    def computed(self) -> int:
        return self.run.computed if self.run else 0

    @property
    def position(self) -> int:
        """The first token still to be planned, as far as known."""
        return self.run.planned if self.run else self.matched or 0

    @property
    def decoding(self) -> bool:
        """True if the next row is one answer token, sampled by an earlier row."""
        run = self.run
        return run is not None and run.drawn == run.planned == self.length - 1

    @property
    def restore(self) -> Restore:
        """Pages back from other tiers."""
        return self.account.restore

    @property
    def untold(self) -> tuple[int, ...]:
        """Answer tokens not yet told by a delta."""
        return tuple(self.tokens[self.prompt_length + (self.told or 0) :])

    @property
    def images_end(self) -> int:
        """The token after the last image."""
        spans = self.request.spans
        return spans[-1].end if spans else 0

    @property
    def shareable(self) -> int:
        """Tokens that may come from the prefix cache, which holds no scores and no states."""
        if self.scored >= self.prompt_length:
            return len(self.content.tokens)
        return self.scored - (self.request.reading is None)

    def extras(self, start: int, end: int) -> tuple[RowExtra, ...]:
        """What a row of tokens [start, end) is asked for beside its token."""
        if self.scored >= self.prompt_length:
            return ()
        request = self.request
        if request.reading is not None:
            count = end - max(start, self.scored)
            return (ReadRun(count, request.reading.labels),) if count > 0 else ()
        assert request.prompt_logprobs is not None
        first, last = max(start + 1, self.scored), min(end + 1, self.prompt_length)
        return (ScoreRun(first, last, request.prompt_logprobs),) if first < last else ()

    def may_draw(self, token_limit: int) -> bool:
        """True if one more token may be planned beyond the plans in flight: the answer has room for
        it, and its mask is or will be ready in time. Always true without an answer.
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
        """True if tokens not yet known to be computed show this image."""
        return self.computed < self.last_use.get(key, 0)

    def upcoming(self, end: int) -> Iterator[tuple[int, Image]]:
        """(first token, image) of images from `position` to `end`, in order, each once."""
        start = self.position
        if start >= self.images_end:
            return
        seen = set()
        for span in self.request.spans:
            image = self.shown.images[span.image]
            if span.end <= start or image.key in seen:
                continue
            if span.start >= end:
                return
            seen.add(image.key)
            yield span.start, image

    def match(self, tokens: int) -> None:
        """So many tokens of a waiting sequence are in the prefix cache. If these are others than
        before, the image awaited behind those may not be the next to show.
        """
        if tokens != self.matched:
            self.blocked = None
        self.matched = tokens

    def outcomes(self) -> tuple[ImageOutcome, ...]:
        """The source of each image, as far as known."""
        return tuple(self.found[image] for image in sorted(self.found))

    def admit(
        self, slot: int, node: Node | None, pages: list[int], computed: int, page_size: int
    ) -> Run:
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
            self.account.restored = self.restore.tokens(self.account.cached, page_size)
        last = {span.image: span.end for span in self.request.spans}
        for image, end in last.items():
            if end <= computed and image not in self.found:
                tier = self.restore.tier(end - 1, page_size)
                self.found[image] = ImageOutcome(image, "kv", tier=tier)
        return self.run

    def preempt(self) -> None:
        """running -> waiting: everything is to be computed again.

        The scheduler has taken pages and pins back.
        """
        assert self.state is State.RUNNING
        self.state, self.run, self.matched = State.WAITING, None, None
        self.restore.done = False

    def finish(self) -> None:
        """Any state but finished -> finished."""
        assert self.state is not State.FINISHED
        self.state, self.run = State.FINISHED, None
