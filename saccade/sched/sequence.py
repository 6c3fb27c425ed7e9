"""One request on its way through the engine.

Owns a sequence's state and its legal transitions. Only the scheduler changes a sequence.

    waiting --admit--> running --finish--> finished        `finish` is legal from waiting too
       ^------preempt-----'
"""

from __future__ import annotations

from enum import Enum

from saccade.cache.content import Content
from saccade.cache.prefix import Node
from saccade.core.types import ImageKey, ImageOutcome, Request


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens `[0, computed)` have valid KV in `pages`; `0 <= computed <= len(tokens)`.

    order: place in the queue, first come first served; kept through preemption.
    told: how many of `pages` the workers know of.
    node: the last page of this sequence held in the prefix cache.
    last_use: per picture, the token after its last span; once that is computed the picture is not
    needed again.
    blocked: the picture whose pixels a waiting sequence waits for.
    found: where each picture was found, by its index, so far as that is known.
    cached: prompt tokens found in the prefix cache at the first admission; None before.
    """

    __slots__ = (
        "blocked",
        "cached",
        "computed",
        "content",
        "found",
        "last_use",
        "node",
        "order",
        "pages",
        "pins",
        "reported",
        "request",
        "slot",
        "state",
        "told",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.order = order
        self.content = Content(
            list(request.tokens), request.spans, request.images, request.cache_salt
        )
        self.state = State.WAITING
        self.computed = 0
        self.slot = -1
        self.pages: list[int] = []
        self.told = 0
        self.node: Node | None = None
        self.pins: set[ImageKey] = set()
        self.last_use = {request.images[span.image].key: span.end for span in request.spans}
        self.blocked: ImageKey | None = None
        self.cached: int | None = None
        self.found: dict[int, ImageOutcome] = {}
        self.reported = False

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
    def decoding(self) -> bool:
        """All that is left to compute is the newest answer token."""
        return self.computed == len(self.content.tokens) - 1 and self.computed >= len(
            self.request.tokens
        )

    def needs(self, key: ImageKey) -> bool:
        """Whether tokens still to be computed show this picture."""
        return self.computed < self.last_use.get(key, 0)

    def outcomes(self) -> tuple[ImageOutcome, ...]:
        """Where each picture was found, so far as that is known."""
        return tuple(self.found[image] for image in sorted(self.found))

    def admit(self, slot: int, node: Node | None, pages: list[int], computed: int) -> None:
        """waiting -> running, with `pages` of the prefix cache that hold the first `computed`
        tokens.
        """
        assert self.state is State.WAITING and computed < len(self.tokens)
        self.state = State.RUNNING
        self.slot, self.node, self.pages, self.told, self.computed = (
            slot,
            node,
            pages,
            len(pages),
            computed,
        )
        if self.cached is not None:
            return
        self.cached = min(computed, self.prompt_length)
        last = {span.image: span.end for span in self.request.spans}
        self.found.update(
            {image: ImageOutcome(image, "kv") for image, end in last.items() if end <= computed}
        )

    def advance(self, computed: int) -> None:
        """Tokens up to `computed` now have KV."""
        assert self.state is State.RUNNING and self.computed < computed <= len(self.tokens)
        self.computed = computed

    def preempt(self) -> None:
        """running -> waiting: everything is to be computed again.

        The scheduler has taken the pages and pins back.
        """
        assert self.state is State.RUNNING and not self.pages and not self.pins
        self.state = State.WAITING
        self.computed, self.slot, self.told = 0, -1, 0

    def finish(self) -> None:
        """Any state but finished -> finished."""
        assert self.state is not State.FINISHED and not self.pages and not self.pins
        self.state = State.FINISHED
        self.slot = -1
