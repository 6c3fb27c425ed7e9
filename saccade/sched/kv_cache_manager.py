"""Pages for sequences: free and reclaimable pages, the need of a new sequence, the pages of an
ended one.

Owns no page: the pool and the prefix cache do. Does not decide which sequence loses pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from saccade.cache.pages import PagePool
from saccade.cache.prefix import Node, PrefixCache
from saccade.core.plan import Place
from saccade.core.types import ImageOutcome, Span
from saccade.sched.cache_control import CacheControlTracker
from saccade.sched.limits import GROWTH_TOKENS
from saccade.sched.sequence import Run, Sequence
from saccade.sched.sharing import has_twin, image_outcome
from saccade.sched.snapshot_scheduler import SnapshotKeeper


class KVCacheManager:
    """The page pool and the prefix cache (None: off) for the scheduler."""

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache | None,
        keeping: CacheControlTracker,
        snapshots: SnapshotKeeper,
        token_limit: int,
    ) -> None:
        self._keeping = keeping
        self._snapshots = snapshots
        self._pool = pool
        self._prefix = prefix
        self._token_limit = token_limit
        # who found too few pages, and how many could be had then
        self._refused: tuple[Sequence, int] | None = None

    @property
    def refused(self) -> Sequence | None:
        """The sequence that found too few pages at its last turn."""
        return self._refused[0] if self._refused else None

    def forget_refusal(self) -> None:
        """Somebody was admitted, or the refused sequence has ended."""
        self._refused = None

    def still_refused(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """True if no page was freed since the sequence was refused."""
        refused = self._refused
        return (
            refused is not None
            and refused[0] is sequence
            and (self._available(running) <= refused[1])
        )

    def find(self, sequence: Sequence) -> list[Node]:
        """The cached pages of a waiting sequence; sets `matched`."""
        path = self._prefix.find(sequence.content) if self._prefix else []
        if sequence.shareable < len(sequence.tokens):
            path = path[: sequence.shareable // self._pool.page_size]
            path = self._prefix.resumable(path) if self._prefix else path
        sequence.matched = len(path) * self._pool.page_size
        return path

    def match(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that lie in the prefix cache."""
        return len(self.find(sequence)) * self._pool.page_size

    def twin_ahead(self, sequence: Sequence, running: Iterable[Sequence], tokens: int) -> bool:
        """True if a running sequence is just computing `tokens` of the same prompt as a waiting
        sequence, which can soon share them.
        """
        start = sequence.position
        if point := self._snapshots.first_point(sequence):
            tokens = point - start  # nothing before it can be shared
        if self._prefix is None or start + tokens > sequence.shareable:
            return False
        return has_twin(sequence, running, start, start + tokens)

    def outcome(self, sequence: Sequence, span: Span, place: Place) -> ImageOutcome:
        """The source of an image now shown. `place`: where its embedding was."""
        return image_outcome(sequence, span, place, self._prefix, self._pool.page_size)

    def make_free(self, pages: int) -> bool:
        """True if so many pages are free, after evicting unheld cached pages."""
        if self._pool.free < pages and self._prefix:
            self._prefix.evict(pages - self._pool.free)
        return self._pool.free >= pages

    def _available(self, running: Iterable[Sequence]) -> int:
        """Free and reclaimable pages, less the near need of running sequences."""
        evictable = self._prefix.evictable if self._prefix else 0
        owed = sum(
            max(0, self._needs_soon(sequence) - len(sequence.run.pages))
            for sequence in running
            if sequence.run is not None
        )
        return self._pool.free + evictable - owed

    def fits(self, sequence: Sequence, path: list[Node], running: Iterable[Sequence]) -> bool:
        """True if all tokens and the next few find pages beside `path` without taking any from the
        running sequences; otherwise the sequence is `refused`.
        """
        unheld = sum(self._pool.refs[node.page] == 1 for node in path)
        available = self._available(running)
        fits = available - unheld >= self._needs_soon(sequence) - len(path)
        self._refused = None if fits else (sequence, available)
        return fits

    def _needs_soon(self, sequence: Sequence) -> int:
        """Pages for the present tokens and the next few."""
        most = min(sequence.prompt_length + sequence.request.most_tokens, self._token_limit)
        return self._pool.pages_for(min(sequence.length + GROWTH_TOKENS, most))

    def hold(self, sequence: Sequence, path: list[Node]) -> Node | None:
        """Give a waiting sequence the pages of `path` with its slot. Returns the last of them in
        the prefix cache (None: off).
        """
        node = self._prefix.hold(sequence.content, path) if self._prefix else None
        self._keeping.admitted(sequence, path)
        return node

    def publish(self, sequence: Sequence, run: Run, computed: int) -> None:
        """KV of a running sequence is valid up to `computed`: make its whole pages findable, and
        keep the requested ones.
        """
        whole = computed // self._pool.page_size
        before, run.computed = run.computed, computed
        crossed = whole > before // self._pool.page_size
        if crossed and self._prefix and run.node is not None:
            run.node = self._prefix.extend(run.node, sequence.content, run.pages, whole)
        self._snapshots.published(sequence, run)
        self._keeping.advanced(sequence, run, before)

    def flush(self) -> None:
        """Forget cached pages that no running sequence holds, and all pins."""
        if self._prefix:
            self._prefix.flush()
        self._keeping.flushed()

    def leave(self, sequence: Sequence, run: Run) -> list[int]:
        """End a run's hold. Its whole computed pages stay findable; the rest are returned, to be
        released once no plan in flight writes to them.
        """
        if not self._prefix or run.node is None:
            return run.pages
        whole = run.computed // self._pool.page_size
        node = self._prefix.leave(run.node, sequence.content, run.pages[:whole], whole)
        self._snapshots.left(sequence, run, node)
        return run.pages[whole:]

    def audit(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that every page is accounted for: free, the trie's, or held by one of
        `holders`.
        """
        self._pool.audit([*holders, self._prefix.owned()] if self._prefix else holders)
