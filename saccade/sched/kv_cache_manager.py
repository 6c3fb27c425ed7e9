"""Manages KV pages for sequences: finds cached pages, allocates and evicts pages, and releases them
when a sequence ends.

The scheduler decides which sequence is preempted if there are too few pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from saccade.cache.pages import PagePool
from saccade.cache.prefix import Node, PrefixCache
from saccade.core.plan import Place
from saccade.core.types import ImageOutcome, Missed, Span, Tier
from saccade.sched.limits import GROWTH_TOKENS
from saccade.sched.parts.step_part import Parts
from saccade.sched.sequence import Run, Sequence


class KVCacheManager:
    """Combines the page pool and the prefix cache (None if disabled) for the scheduler."""

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache | None,
        parts: Parts,
        token_limit: int,
    ) -> None:
        """Use the given caches.

        parts: the scheduler's optional features (see `Parts`).
        token_limit: maximum tokens in one sequence.
        """
        self._loads = parts.loads
        self._parts = parts.every
        self._pool = pool
        self._prefix = prefix
        self._token_limit = token_limit
        # the sequence that could not be admitted, and how many pages were available then
        self._refused: tuple[Sequence, int] | None = None

    @property
    def prefix(self) -> PrefixCache | None:
        """The prefix cache, or None if it is disabled."""
        return self._prefix

    @property
    def refused(self) -> Sequence | None:
        """The sequence that the last planning pass could not admit for lack of pages, or None."""
        return self._refused[0] if self._refused else None

    def forget_refusal(self) -> None:
        """Reset `refused`. Call this when a sequence was admitted or the refused one has ended."""
        self._refused = None

    def still_refused(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Return True if the sequence was refused, and no pages have become available since."""
        refused = self._refused
        return (
            refused is not None
            and refused[0] is sequence
            and (self._available(running) <= refused[1])
        )

    def find_pages(self, sequence: Sequence) -> list[Node]:
        """Return the cached pages of a waiting sequence, and set its `matched`."""
        path = self._prefix.find(sequence.content, sequence.path) if self._prefix else []
        sequence.path = path
        if sequence.shareable < len(sequence.tokens):
            path = path[: sequence.shareable // self._pool.page_size]
            path = self._prefix.resumable(path) if self._prefix else path
        coming = 0 if self._loads is None else self._loads.count_coming(sequence, path)
        sequence.match((len(path) + coming) * self._pool.page_size)
        return path

    def match(self, sequence: Sequence) -> int:
        """Return how many of the sequence's tokens are in the prefix cache, or can be loaded into
        it.
        """
        self.find_pages(sequence)
        return sequence.position

    def awaits(self, sequence: Sequence, path: list[Node], running: Iterable[Sequence]) -> bool:
        """Return True if a waiting sequence should wait for pages that are being loaded from
        another tier.

        If this returns False, admit the sequence with only its cached pages, `path`. `matched` has
        been set accordingly.
        """
        if self._loads is None or sequence.matched == len(path) * self._pool.page_size:
            return False

        def has_room() -> bool:
            return self._covers(self._available(running), sequence, path)

        return self._loads.awaits(sequence, path, has_room)

    # ---- pages of the pool

    def duplicate_prefix_ahead(
        self, sequence: Sequence, running: Iterable[Sequence], tokens: int
    ) -> bool:
        """Return True if a running sequence is computing the next `tokens` of a waiting sequence.

        Then the waiting sequence should wait, to use these pages from the cache.
        """
        start = sequence.position
        for part in self._parts:
            if point := part.first_shared(sequence):
                tokens = point - start  # no earlier position can be shared
        if self._prefix is None or start + tokens > sequence.shareable:
            return False
        return has_duplicate_prefix(sequence, running, start, start + tokens)

    def outcome(self, sequence: Sequence, span: Span, place: Place) -> ImageOutcome:
        """Return where the embedding of an image that this step uses came from.

        If two images of a sequence have the same key, the first one counts as encoded.

        place: where the embedding was before the step.
        """
        encoded = sequence.encoded.pop(sequence.shown.images[span.image].key, None)
        lost = encoded.missed if encoded else None
        missed_kv = self._why_missing(sequence, span.end, lost)
        if encoded:
            return ImageOutcome(span.image, encoded.source, missed_kv, lost, tiles=encoded.tiles)
        tier: Tier = "disk" if place == "staged" else place
        return ImageOutcome(span.image, "embedding", missed_kv, None, tier)

    def _why_missing(self, sequence: Sequence, end: int, lost: Missed | None) -> Missed:
        """Return why the KV of an image that ends at `end` was not in the prefix cache.

        lost: why its embedding was missing, or None if it was cached.
        """
        if self._prefix is None or sequence.request.prompt_logprobs is not None:
            return "prefix cache off"
        if lost is not None and lost != "evicted":
            return lost
        page_size = self._pool.page_size
        if (sequence.cached or 0) // page_size == (end - 1) // page_size:
            return "no full page"
        return "other prompt or evicted" if self._prefix.evictions else "other prompt"

    def make_free(self, pages: int) -> bool:
        """Evict cached pages that no sequence holds until `pages` pages are free.

        Returns False if there are too few of them.
        """
        if self._pool.free < pages and self._prefix:
            self._prefix.evict(pages - self._pool.free)
        return self._pool.free >= pages

    def forget(self, pages: int) -> int:
        """Evict up to `pages` cached pages that are neither in use nor pinned. Return how many were
        evicted.
        """
        return self._prefix.evict(pages, pinned=False) if self._prefix else 0

    def _available(self, running: Iterable[Sequence]) -> int:
        """Return the number of free and evictable pages, minus those that running sequences need
        soon.
        """
        evictable = self._prefix.evictable if self._prefix else 0
        owed = sum(
            max(0, self._needs_soon(sequence) - len(sequence.run.pages))
            for sequence in running
            if sequence.run is not None
        )
        return self._pool.free + evictable - owed

    def fits(self, sequence: Sequence, path: list[Node], running: Iterable[Sequence]) -> bool:
        """Return True if the pages that a sequence needs soon, in addition to its cached pages
        `path`, are available.

        Pages that running sequences need soon are not available. If this returns False, `refused`
        returns the sequence.
        """
        available = self._available(running)
        fits = self._covers(available, sequence, path)
        self._refused = None if fits else (sequence, available)
        return fits

    def _covers(self, available: int, sequence: Sequence, path: list[Node]) -> bool:
        """Return True if `available` pages suffice for what a sequence needs soon in addition to
        `path`.
        """
        unheld = sum(self._pool.refs[node.page] == 1 for node in path)
        return available - unheld >= self._needs_soon(sequence) - len(path)

    def _needs_soon(self, sequence: Sequence) -> int:
        most = min(sequence.prompt_length + sequence.request.most_tokens, self._token_limit)
        return self._pool.pages_for(min(sequence.length + GROWTH_TOKENS, most))

    def hold_pages(self, sequence: Sequence, path: list[Node]) -> Node | None:
        """Hold the pages of `path` for a sequence that is being admitted, so that they are not
        evicted.

        Returns the last node in the prefix cache, or None if the cache is disabled.
        """
        if self._prefix is None:
            return None
        node = self._prefix.hold(sequence.content, path, idle=sequence.idle)
        sequence.path = []
        if sequence.cached is None and (self._prefix.pinned or self._prefix.kept is not None):
            self._prefix.hit(path, sequence.client)
        if self._loads is not None:
            self._loads.admitted(sequence, len(path) * self._pool.page_size)
        return node

    def publish(self, sequence: Sequence, run: Run, computed: int) -> None:
        """Add the full pages of a running sequence to the prefix cache.

        computed: the number of tokens with valid KV.
        """
        whole = computed // self._pool.page_size
        before, run.computed = run.computed, computed
        crossed = whole > before // self._pool.page_size
        if crossed and self._prefix and run.node is not None:
            run.node = self._prefix.extend(run.node, sequence.content, run.pages, whole)

    def flush(self, disk: bool) -> None:
        """Remove all pins, and all cached pages that running sequences do not use.

        disk: True to also clear the disk.
        """
        if self._loads is not None:
            self._loads.flush(disk)
        elif self._prefix is not None:
            self._prefix.flush()

    def leave(self, sequence: Sequence, run: Run) -> list[int]:
        """Release a run's hold on the prefix cache, and return the pages that are not cached.

        Full computed pages stay cached, and `run.node` becomes the last of them. Release the
        returned pages once no plan in flight writes to them.
        """
        if self._prefix is None or run.node is None:
            return run.pages
        if self._loads is not None:
            self._loads.left(sequence)
        whole = run.computed // self._pool.page_size
        run.node = self._prefix.leave(
            run.node, sequence.content, run.pages[:whole], whole, idle=sequence.idle
        )
        return run.pages[whole:]

    def audit(self, holders: Iterable[Iterable[int]], lines: Iterable[int]) -> None:
        """Assert that every page and every slot for states is accounted for.

        A page is free, in the prefix cache, being loaded, or in one of `holders`.

        holders: the pages of each run or plan in flight.
        lines: the slots for states that runs use.
        """
        arriving = () if self._loads is None else tuple(self._loads.holders)
        owned = (self._prefix.owned(),) if self._prefix else ()
        self._pool.audit([*holders, *arriving, *owned])
        if self._prefix is not None and self._prefix.snapshots is not None:
            coming = () if self._loads is None else tuple(self._loads.lines)
            self._prefix.snapshots.audit((*lines, *coming))


def has_duplicate_prefix(
    sequence: Sequence, running: Iterable[Sequence], start: int, end: int
) -> bool:
    """Return True if a running sequence has not yet computed tokens `[start, end)` of the same
    prompt.
    """
    if end >= len(sequence.tokens):
        return False
    return any(
        start <= other.computed < min(end, other.prompt_length)
        and other.content.partition == sequence.content.partition
        and other.tokens[:end] == sequence.tokens[:end]
        and other.content.shown(0, end) == sequence.content.shown(0, end)
        for other in running
    )
