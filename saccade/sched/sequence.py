"""The state of one request in the engine, and its legal transitions. Only the scheduler changes a
sequence.

    waiting --admit--> running --finish--> finished        a waiting sequence may finish, too
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
"""What an image was encoded from, in the terms of `ImageOutcome.level`."""


class EncodedImage(NamedTuple):
    """Why an image's embedding was missing, what it was encoded from, and which tiles were new."""

    missed: Missed
    source: Source
    tiles: tuple[bool, ...] = ()


class State(Enum):
    """The states of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """What a sequence uses from its admission until it is preempted or finishes: a slot, pages and
    pinned images.
    """

    # slot and pages
    slot: int
    node: Node | None  # its last page that is in the prefix cache
    pages: list[int]  # its page table
    announced: int  # the first `announced` of `pages` have been sent to the workers
    # progress
    computed: int  # tokens `[0, computed)` have valid KV, according to the results so far
    planned: int  # tokens `[0, planned)` are computed or in a plan in flight
    opened: int  # tokens sent to the workers when the slot was opened
    drawing: int = 0  # tokens that plans in flight will sample
    drawn: int = -1  # position of the last token that a planned row samples
    waits: bool = False  # nothing can be planned before the result of the plan in flight
    # embeddings
    pins: set[ImageKey] = field(default_factory=set)  # held on the device for this sequence


@dataclass(slots=True)
class Account:
    """What deltas report about a sequence in addition to its tokens."""

    cached: int | None = None  # prompt tokens cached at the first admission, or None before
    admitted: float = 0.0  # time of the first admission (`time.monotonic()`), or 0.0 before
    restored: tuple[tuple[PageTier, int], ...] = ()  # cached tokens that each slower tier provided
    slow_reads: bool = False  # some pages in other tiers were recomputed, as reads were too slow
    caching: CacheReport | None = None  # None unless the request has cache options
    draft_counts: tuple[DraftCounts, ...] = ()  # draft tokens, accepted and rejected


class PromptImages:
    """The images of a request, with the keys of the embeddings that are used for them.

    These are the request's own keys, except for aliases (`image_aliases.py`).
    """

    __slots__ = ("_request", "chunk_aware", "images", "last_use", "shared")

    def __init__(self, request: Request, *, chunk_aware: bool) -> None:
        self._request = request
        self.chunk_aware = chunk_aware  # as in `SchedulerLimits`
        self.images = list(request.images)  # by index in the request
        self.shared: dict[ImageKey, ImageKey] = {}  # the request's key -> the key that is used
        # the position after each image's last token. Once the tokens before it are computed, the
        # image is no longer needed. If not `chunk_aware`, it is the same for all images.
        self.last_use = self._last_use()

    def show_as(self, own: ImageKey, image: Image) -> None:
        """Use the embedding of `image` for the image with the key `own` from now on."""
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
    """A request, the tokens generated so far, and its `run` while it is running."""

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
        self.request = request
        self.grammar_state = grammar_state  # None if the request has no grammar
        self.order = order  # increases with the time of arrival
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
        # tokens that the last lookup found in the prefix cache, or that can be loaded into it; None
        # if a lookup is needed
        self.matched: int | None = None
        self.path: list[Node] = []  # the pages of the last lookup, from which the next continues
        self.blocked: ImageKey | None = None  # the missing image that a waiting sequence needs
        # The device had no space for its next image. It is then admitted for a chunk of any length,
        # which may release the images before.
        self.cramped = False
        self.encoded: dict[ImageKey, EncodedImage] = {}  # images encoded for this sequence
        self.found: dict[int, ImageOutcome] = {}  # by index, the images whose source is known
        self.account = Account(caching=CacheReport() if request.caching.is_reported else None)
        # generated tokens reported in deltas, or None before the first delta
        self.reported: int | None = None
        # the first prompt token whose logprob or pooled output is still to be computed. It is the
        # prompt's length if none are requested.
        self.scored = len(request.tokens)
        if request.prompt_logprobs is not None:
            self.scored = 1  # the first token has no logprob, because none precedes it
        elif request.reading is not None:
            self.scored = max(0, len(request.tokens) - request.reading.last)

    @property
    def last_use(self) -> dict[ImageKey, int]:
        """For each image's key, the position after its last token."""
        return self.shown.last_use

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def idle(self) -> bool:
        """True for a background request, which runs only while there are no other requests."""
        return self.request.caching.idle

    @property
    def group(self) -> str:
        """The id that all choices of one HTTP request share, or the request's own id."""
        return self.request.group or self.request.id

    @property
    def cached(self) -> int | None:
        """The number of prompt tokens that were cached at the first admission, or None before
        it.
        """
        return self.account.cached

    @property
    def tokens(self) -> list[int]:
        """The prompt and the tokens generated so far."""
        return self.content.tokens

    @property
    def prompt_length(self) -> int:
        return len(self.request.tokens)

    @property
    def output_length(self) -> int:
        return len(self.content.tokens) - len(self.request.tokens)

    @property
    def length(self) -> int:
        """The number of tokens, including those that plans in flight will sample."""
        return len(self.content.tokens) + (self.run.drawing if self.run else 0)

    @property
    def computed(self) -> int:
        return self.run.computed if self.run else 0

    @property
    def position(self) -> int:
        """The first token to plan next. For a waiting sequence it follows the tokens found in the
        cache so far.
        """
        return self.run.planned if self.run else self.matched or 0

    @property
    def decoding(self) -> bool:
        """True if the next row consists of one generated token, which an earlier row samples."""
        run = self.run
        return run is not None and run.drawn == run.planned == self.length - 1

    @property
    def unreported(self) -> tuple[int, ...]:
        """The generated tokens that no delta has reported yet."""
        return tuple(self.tokens[self.prompt_length + (self.reported or 0) :])

    @property
    def images_end(self) -> int:
        """The position after the last image token."""
        spans = self.request.spans
        return spans[-1].end if spans else 0

    @property
    def shareable(self) -> int:
        """The number of leading tokens whose KV may come from the prefix cache.

        Prompt tokens that need logprobs or pooled outputs must be computed, because cached KV has
        neither.
        """
        if self.scored >= self.prompt_length:
            return len(self.content.tokens)
        return self.scored - (self.request.reading is None)

    def extras(self, start: int, end: int) -> tuple[RowExtra, ...]:
        """Return what a row with tokens `[start, end)` computes in addition to the next token."""
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
        """Return how many tokens may still be generated after those of the plans in flight."""
        most = self.prompt_length + self.request.sampling.max_tokens
        return min(most, token_limit) - self.length

    def can_sample(self, token_limit: int) -> bool:
        """Return True if one more token may be planned after the tokens of the plans in flight.

        That requires that the maximum length is not reached, and that the token's mask will be
        ready in time. It is always True for a request that generates no tokens.
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
        """Return True if tokens that are still to be computed contain this image."""
        return self.computed < self.last_use.get(key, 0)

    def upcoming(self, end: int) -> Iterator[tuple[int, Image]]:
        """Yield (first token, image) for the images from `position` to `end`, in order, each once.

        If images are not handled chunk by chunk (`chunk_aware`), all of them count as being at
        `position`.
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
        """Record that the first `tokens` tokens of a waiting sequence are in the prefix cache.

        If that number has changed since the last lookup, clear `blocked`, because the next image to
        encode may be a different one.
        """
        if tokens != self.matched:
            self.blocked = None
        self.matched = tokens

    def outcomes(self) -> tuple[ImageOutcome, ...]:
        """Return the source of each image for which it is known, in the order of the images."""
        return tuple(self.found[image] for image in sorted(self.found))

    def newly_cached(self, computed: int) -> list[tuple[int, int]]:
        """Return (index, end) of the images within the first `computed` tokens whose source is not
        known yet.
        """
        last = {span.image: span.end for span in self.request.spans}
        ends = last.items()
        return [(i, end) for i, end in ends if end <= computed and i not in self.found]

    def admit(self, slot: int, node: Node | None, pages: list[int], computed: int) -> Run:
        """Change the state from waiting to running, and return the run.

        slot: the workers' slot.
        node: the last node in the prefix cache, or None if it is disabled.
        pages: the pages from the prefix cache, which contain the first `computed` tokens.
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
        """Change the state from running to waiting. Tokens that are not cached will be computed
        again.

        The scheduler must have released the pages and pins.
        """
        assert self.state is State.RUNNING
        self.state, self.run, self.matched = State.WAITING, None, None

    def finish(self) -> None:
        """Change the state to finished, from any other state."""
        assert self.state is not State.FINISHED
        self.state, self.run = State.FINISHED, None
