"""One request on its way through the engine.

Owns a sequence's state and its legal transitions. Only the scheduler changes a sequence.

    waiting --admit--> running --finish--> finished        `finish` is legal from waiting too
       ^------preempt-----'
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from saccade.cache.content import Content
from saccade.cache.prefix import Node
from saccade.core.plan import PageTier, ReadRun, RowExtra, ScoreRun
from saccade.core.types import (
    CacheReport,
    DraftCounts,
    Image,
    ImageKey,
    ImageOutcome,
    Missed,
    Request,
)

if TYPE_CHECKING:
    from saccade.sched.grammar_state import GrammarState

Source = Literal["none", "pixels", "encoder"]
"""The source of an encode, in the terms of `ImageOutcome.level`."""


class EncodedImage(NamedTuple):
    """Why an image was missing, what it was encoded from, and which of its tiles were new."""

    missed: Missed
    source: Source
    tiles: tuple[bool, ...] = ()


class State(Enum):
    """The stage of a sequence's life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """One stay of a sequence in a slot, from its admission to its preemption or its end."""

    # its places
    slot: int
    node: Node | None  # the last page held in the prefix cache
    pages: list[int]
    announced: int  # how many of `pages` the workers know
    # how far it is
    computed: int  # tokens `[0, computed)` have valid KV, by the results so far
    planned: int  # the end of the tokens planned so far
    opened: int  # tokens sent to the worker when the slot was opened
    drawing: int = 0  # unknown tokens that plans in flight sample
    drawn: int = -1  # the place of the last token sampled by a row
    waits: bool = False  # the sequence continues only with the result of the plan in flight
    # what it keeps
    pins: set[ImageKey] = field(default_factory=set)  # embeddings kept for this sequence


@dataclass(slots=True)
class Account:
    """The report for the front, beside tokens."""

    cached: int | None = None  # prompt tokens found at the first admission, or None before
    admitted: float = 0.0  # time of the first admission (`time.monotonic()`), or 0.0 before
    # tokens among `cached` that were loaded from other tiers, by tier
    restored: tuple[tuple[PageTier, int], ...] = ()
    slow_reads: bool = False  # some pages there were computed instead
    caching: CacheReport | None = None  # None unless the request asked something from the caches
    draft_counts: tuple[DraftCounts, ...] = ()  # draft tokens, accepted and wrong


class PromptImages:
    """A request's images by their embeddings' names.

    The names are the request's own, except for images with another's pixels (`image_aliases.py`).

    images: by place. shared: own name -> other. last_use: per image, the token after its last span.
    Once that token is computed, the image has served. chunk_aware: False lets every image serve
    until the last one has.
    """

    __slots__ = ("_request", "chunk_aware", "images", "last_use", "shared")

    def __init__(self, request: Request, *, chunk_aware: bool) -> None:
        self._request = request
        self.chunk_aware = chunk_aware
        self.images = list(request.images)
        self.shared: dict[ImageKey, ImageKey] = {}
        self.last_use = self._last_use()

    def show_as(self, own: ImageKey, image: Image) -> None:
        """Show `image` instead of the request's `own` from now on."""
        self.shared.pop(own, None)
        if image.key != own:
            self.shared[own] = image.key
        for place, each in enumerate(self._request.images):
            if each.key == own:
                self.images[place] = image
        self.last_use = self._last_use()

    def _last_use(self) -> dict[ImageKey, int]:
        spans = self._request.spans
        return {
            self.images[span.image].key: span.end if self.chunk_aware else spans[-1].end
            for span in spans
        }


class Sequence:
    """A request, its answer tokens so far, and, while running, its `run`."""

    __slots__ = (
        "__weakref__",
        "account",
        "blocked",
        "content",
        "cramped",
        "encoded",
        "found",
        "grammar_state",
        "matched",
        "order",
        "path",
        "reported",
        "request",
        "run",
        "scored",
        "shown",
        "state",
    )

    def __init__(
        self,
        request: Request,
        order: int,
        grammar_state: GrammarState | None = None,
        *,
        chunk_aware: bool = True,
    ) -> None:
        """chunk_aware: as in `SchedulerLimits`."""
        self.request = request
        self.grammar_state = grammar_state  # the allowed form of the answer, or None for any text
        self.order = order  # place of arrival
        self.content = Content(
            list(request.tokens),
            request.spans,
            request.images,
            request.cache_salt,
            request.adapter.fingerprint,
        )
        self.state = State.WAITING
        self.run: Run | None = None
        self.shown = PromptImages(request, chunk_aware=chunk_aware)
        self.matched: int | None = None
        self.path: list[Node] = []  # the pages found by it, where the next one starts
        self.blocked: ImageKey | None = None  # the image awaited by a waiting sequence
        # the device lacked room for the next image beside those present, so any step is welcome
        self.cramped = False
        self.encoded: dict[ImageKey, EncodedImage] = {}  # images encoded for this sequence
        # source of each image, by its index, as far as known
        self.found: dict[int, ImageOutcome] = {}
        self.account = Account(caching=CacheReport() if request.caching.is_reported else None)
        # answer tokens reported in deltas, or None before the first delta
        self.reported: int | None = None
        # the first prompt token still to be scored or read, by the results so far. All tokens count
        # as scored unless some are requested.
        self.scored = len(request.tokens)
        if request.prompt_logprobs is not None:
            self.scored = 1  # the first has no predecessor
        elif request.reading is not None:
            self.scored = max(0, len(request.tokens) - request.reading.last)

    @property
    def last_use(self) -> dict[ImageKey, int]:
        """As in `PromptImages`."""
        return self.shown.last_use

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def idle(self) -> bool:
        """Return True if the request is unawaited."""
        return self.request.caching.idle

    @property
    def group(self) -> str:
        """The group of answers to one HTTP request, or the request alone."""
        return self.request.group or self.request.id

    @property
    def cached(self) -> int | None:
        """Prompt tokens found in the prefix cache at the first admission, or None before."""
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
        """Count the tokens, including tokens sampled by plans in flight."""
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
        """Return True if the next row is one answer token, sampled by an earlier row."""
        run = self.run
        return run is not None and run.drawn == run.planned == self.length - 1

    @property
    def unreported(self) -> tuple[int, ...]:
        """Answer tokens that deltas have yet to report."""
        return tuple(self.tokens[self.prompt_length + (self.reported or 0) :])

    @property
    def images_end(self) -> int:
        """The token after the last image."""
        spans = self.request.spans
        return spans[-1].end if spans else 0

    @property
    def shareable(self) -> int:
        """Tokens that may be taken from the prefix cache, which lacks scores and states."""
        if self.scored >= self.prompt_length:
            return len(self.content.tokens)
        return self.scored - (self.request.reading is None)

    def extras(self, start: int, end: int) -> tuple[RowExtra, ...]:
        """Return what a row with tokens [start, end) is asked for beside its token."""
        if self.scored >= self.prompt_length:
            return ()
        request = self.request
        if request.reading is not None:
            count = end - max(start, self.scored)
            return (ReadRun(count, request.reading.labels),) if count > 0 else ()
        assert request.prompt_logprobs is not None
        first, last = max(start + 1, self.scored), min(end + 1, self.prompt_length)
        return (ScoreRun(first, last, request.prompt_logprobs),) if first < last else ()

    def remaining_tokens(self, token_limit: int) -> int:
        """Count the tokens that the answer has room for beyond the plans in flight."""
        most = self.prompt_length + self.request.sampling.max_tokens
        return min(most, token_limit) - self.length

    def can_sample(self, token_limit: int) -> bool:
        """Return True if one more token may be planned beyond the plans in flight.

        The answer must have room for it, and its mask must be ready in time. Always True without an
        answer.
        """
        if self.request.reading is not None:
            return True
        grammar_state = self.grammar_state
        if grammar_state is not None and not (
            grammar_state.quick if self.length > len(self.tokens) else grammar_state.ready
        ):
            return False
        return self.remaining_tokens(token_limit) > 0

    def needs(self, key: ImageKey) -> bool:
        """Return True if tokens still to be computed, as far as known, show this image."""
        return self.computed < self.last_use.get(key, 0)

    def upcoming(self, end: int) -> Iterator[tuple[int, Image]]:
        """Yield (first token, image) for images from `position` to `end`, in order, each once.

        All images count as at `position` if they are encoded before any chunk.
        """
        start, apart = self.position, self.shown.chunk_aware
        if start >= self.images_end:
            return
        seen = set()
        for span in self.request.spans:
            image = self.shown.images[span.image]
            if (apart and span.end <= start) or image.key in seen:
                continue
            if apart and span.start >= end:
                return
            seen.add(image.key)
            yield span.start if apart else start, image

    def match(self, tokens: int) -> None:
        """Record a prefix hit of `tokens` while waiting.

        A new hit length clears `blocked`: another image may be the next to show.
        """
        if tokens != self.matched:
            self.blocked = None
        self.matched = tokens

    def outcomes(self) -> tuple[ImageOutcome, ...]:
        """Return the source of each image, as far as known."""
        return tuple(self.found[image] for image in sorted(self.found))

    def newly_cached(self, computed: int) -> list[tuple[int, int]]:
        """Return images within the first `computed` tokens with unknown source, and their ends."""
        last = {span.image: span.end for span in self.request.spans}
        ends = last.items()
        return [(i, end) for i, end in ends if end <= computed and i not in self.found]

    def admit(self, slot: int, node: Node | None, pages: list[int], computed: int) -> Run:
        """Move from waiting to running.

        `pages`: from the prefix cache, with the first `computed` tokens.
        """
        assert self.state is State.WAITING and computed < len(self.tokens)
        self.state = State.RUNNING
        self.run = Run(slot, node, pages, len(pages), computed, computed, len(self.tokens))
        self.blocked, self.cramped = None, False
        if self.account.cached is None:
            self.account.cached = min(computed, self.prompt_length)
            self.account.admitted = time.monotonic()
        for image, _ in self.newly_cached(computed):
            self.found[image] = ImageOutcome(image, "kv")
        return self.run

    def preempt(self) -> None:
        """Move from running to waiting, with everything to be computed again.

        The scheduler has taken pages and pins back.
        """
        assert self.state is State.RUNNING
        self.state, self.run, self.matched = State.WAITING, None, None

    def finish(self) -> None:
        """Move from any state but finished to finished."""
        assert self.state is not State.FINISHED
        self.state, self.run = State.FINISHED, None
