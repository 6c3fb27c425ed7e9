"""Indexes the KV pages and states in host memory and on disk, and queues the moves that workers
have to make.

The workers hold the bytes. They execute the moves from `take_moves` at the start of a plan, before
any computation.

    device ──save──▶ host, disk ──fetch──▶ read ──place──▶ device    (the page stays in its tier)

A page may be in several tiers, and eviction from one tier does not affect the others. In a chain
of pages, those closer to the root are more valuable, because a missing page makes all later ones
useless. So a use is recorded from the last page of a chain to the first, and the last is evicted
first.

In each tier, a client's pins are limited to a fraction of the tier. They cover the pages that are
already in the tier and the pages that are saved later. A pin in a tier remains if the pin on the
device is evicted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from saccade.cache.content import state_name
from saccade.cache.pins import Clock, PinnedItems, PinTable
from saccade.core.config import EngineConfig, embedding_file_bytes
from saccade.core.family import FamilySpec
from saccade.core.plan import (
    PAGE_TIERS,
    Happened,
    PageCopy,
    PageMoves,
    PageOutcome,
    PageTier,
    TierMoves,
)

WORTH = 1.0
"""The value per byte of any page. Pages have one size, and each saves the same amount of work."""


class CacheTierState:
    """Indexes the pages in one tier, and queues their moves."""

    def __init__(
        self,
        budget_bytes: int,
        size: Callable[[int], int],
        pins: PinTable[bytes],
        found: Iterable[tuple[bytes, int]] = (),
    ) -> None:
        """Start with the pages that an earlier run left.

        size: converts the bytes of a page to the bytes that it takes in the tier.
        pins: an empty table, whose limit is in bytes of the tier.
        found: (name, bytes in the tier) of each page, the oldest first.
        """
        self.pinned = PinnedItems(pins)
        self.book = self.pinned.tier(budget_bytes)
        # counts of pages saved, not saved and read, and of the reasons why pages were computed
        self.counts: Counter[PageOutcome] = Counter()
        self._size = size
        self._save: dict[bytes, PageCopy] = {}
        self._place: dict[bytes, PageCopy] = {}
        self._fetch: dict[bytes, PageCopy] = {}
        self._drop: dict[bytes, None] = {}
        self._forget: list[bytes] = []
        for name, nbytes in found:
            self.book.put(name, nbytes, WORTH)
        self._remove(self.book.make_room(0))

    def __contains__(self, name: object) -> bool:
        return name in self.book

    @property
    def moving(self) -> bool:
        """Whether the next plan has to move pages."""
        return bool(self._save or self._place or self._fetch or self._drop or self._forget)

    @property
    def placing(self) -> Collection[bytes]:
        """Pages that have been read, and that the next plan writes to the pool."""
        return self._place

    def take_moves(self) -> TierMoves:
        """Remove and return the pending moves, which the workers must execute."""
        moves = TierMoves(
            tuple(self._drop),
            tuple(self._save.values()),
            tuple(self._forget),
            tuple(self._fetch.values()),
            tuple(self._place.values()),
        )
        self._save, self._place, self._drop = {}, {}, {}
        self._fetch, self._forget = {}, []
        return moves

    def write_page(self, copy: PageCopy, nbytes: int) -> int:
        """Queue a write of a page to the tier, unless it is there or too large. Returns the bytes
        to write.
        """
        name, size = copy.name, self._size(nbytes)
        if name in self.book or size > self.book.budget_bytes:
            return 0
        self.book.put(name, size, WORTH)
        self._remove(gone for gone in self.pinned.make_room(self.book, 0, {name}) if gone != name)
        if name not in self.book:
            return 0
        if name in self._drop:
            del self._drop[name]  # the workers have not dropped it yet
            return 0
        self._save[name] = copy
        self.counts["saved"] += 1
        return nbytes

    def fetch(self, name: bytes, place: int, *, state: bool = False) -> None:
        """Queue a read of a page into slot `place` of the pool. The caller must have pinned the
        page in `book`.

        `note_read`, `lost` or `forget` ends the read and releases the pin.
        """
        self._fetch[name] = PageCopy(name, place, state)

    def note_read(self, name: bytes, place: int, *, state: bool = False) -> None:
        """Record that a page was read. The next plan places it in slot `place` of the pool."""
        self.book.release(name)
        self.counts["read"] += 1
        self._place[name] = PageCopy(name, place, state)

    def lost(self, name: bytes, why: Happened, *, held: bool = True) -> None:
        """Record a failed read, after which the page counts as missing.

        held: whether the page is pinned in `book` for a sequence that waited for it.
        """
        if held:
            self.book.release(name)
        self.counts[why] += 1
        if name in self.book and name not in self.book.held:
            self.book.remove(name)

    def not_saved(self, name: bytes) -> None:
        """Record a failed write. A read of this page in progress will fail too."""
        self.counts["not saved"] += 1
        if name in self.book and name not in self.book.held:
            self.book.remove(name)

    def forget(self, name: bytes, *, reading: bool) -> None:
        """Drop a page that was read and is not needed or, with `reading`, cancel a read in
        progress.
        """
        if reading:
            self.book.release(name)
        self._place.pop(name, None)
        if self._fetch.pop(name, None) is None:
            self._forget.append(name)

    def pin(self, items: Iterable[tuple[bytes, int]], client: str, seconds: int) -> None:
        """Pin items for a client for `seconds`, including items that are not in the tier yet.

        items: (name, bytes) of each item.
        """
        sized = [(name, self._size(nbytes)) for name, nbytes in items]
        self.pinned.pin(sized, client, seconds)

    def flush(self) -> None:
        """Remove all pages except those that are being read."""
        self._remove(self.book.clear(self.book.held))

    def _remove(self, names: Iterable[bytes]) -> None:
        for name in names:
            if self._save.pop(name, None) is None:
                self._drop[name] = None


class OffloadedPages:
    """Indexes the KV pages in all tiers. Implements `cache.page_tiers.PageTiers`."""

    def __init__(
        self,
        identity: bytes,
        page_bytes: int,
        state_bytes: int,
        disk_bytes: int = 0,
        found: Iterable[tuple[bytes, int]] = (),
        host_bytes: int = 0,
        pinned_share: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Create the tiers that have a budget.

        `page_bytes`, `state_bytes`, `host_bytes`: totals over all ranks. The host tier needs at
        least one page.
        `found`: (name, bytes on disk) of each page left by an earlier run, the oldest first.
        `pinned_share`: the fraction of each tier that pins may take.
        """
        self.identity = identity
        self.page_bytes = page_bytes
        self.state_bytes = state_bytes
        self.tiers: dict[PageTier, CacheTierState] = {}
        if host_bytes >= page_bytes:
            whole = host_bytes - host_bytes % page_bytes
            pins: PinTable[bytes] = PinTable(int(pinned_share * whole), clock)
            self.tiers["host"] = CacheTierState(whole, self._in_pages, pins)
        if disk_bytes:
            pins = PinTable(int(pinned_share * disk_bytes), clock)
            self.tiers["disk"] = CacheTierState(disk_bytes, embedding_file_bytes, pins, found)

    def _in_pages(self, nbytes: int) -> int:
        """Round bytes up to whole pages, the unit in which host memory is allocated.

        A state gets an extra page for the alignment of its parts.
        """
        pages = -(-nbytes // self.page_bytes) + (nbytes != self.page_bytes)
        return pages * self.page_bytes

    def __contains__(self, name: object) -> bool:
        return any(name in tier for tier in self.tiers.values())

    @property
    def empty(self) -> bool:
        return not any(len(tier.book) for tier in self.tiers.values())

    def where(self, name: bytes) -> PageTier:
        """Return the fastest tier that has the page."""
        return next(place for place, tier in self.tiers.items() if name in tier)

    @property
    def moving(self) -> bool:
        """Whether the next plan has to move pages."""
        return any(tier.moving for tier in self.tiers.values())

    def take_moves(self) -> PageMoves:
        """Remove and return the pending moves in all tiers, which the workers must execute."""
        return tuple(
            (place, tier.take_moves()) for place, tier in self.tiers.items() if tier.moving
        )

    def write_page(
        self, name: bytes, page: int, line: int | None, tiers: Iterable[PageTier] = PAGE_TIERS
    ) -> int:
        """Queue writes of page slot `page`, and of the state after it in slot `line`, to each of
        `tiers` that lacks them.

        Returns the bytes to write.
        """
        written = self._keep(PageCopy(name, page), self.page_bytes, tiers)
        if line is not None:
            copy = PageCopy(state_name(name), line, True)
            written += self._keep(copy, self.state_bytes, tiers)
        return written

    def _keep(self, copy: PageCopy, nbytes: int, tiers: Iterable[PageTier]) -> int:
        # A page that has not been placed in the pool yet cannot be copied from there.
        if any(copy.name in tier.placing for tier in self.tiers.values()):
            return 0
        return sum(
            self.tiers[place].write_page(copy, nbytes) for place in tiers if place in self.tiers
        )

    def used(self, names: Sequence[bytes]) -> None:
        """Record a use of a chain of pages.

        names: the keys of its pages, starting with the first one.
        """
        for tier in self.tiers.values():
            for name in reversed(names):
                if name in tier:
                    tier.book.use(name, WORTH)

    def pin(self, chain: Sequence[tuple[bytes, bool]], client: str, seconds: int) -> None:
        """Pin a chain of pages for a client in every tier for `seconds`.

        chain: the key of each page, starting with the first one, and whether there is a state after
        it.

        A tier pins as many of these pages as the client's part of its limit allows.
        """
        items: list[tuple[bytes, int]] = []
        for name, state in chain:
            items.append((name, self.page_bytes))
            if state:
                items.append((state_name(name), self.state_bytes))
        for tier in self.tiers.values():
            tier.pin(items, client, seconds)

    def hit(self, names: Sequence[bytes], client: str) -> None:
        """Renew a client's pins on a chain of pages.

        names: the keys of its pages, starting with the first one.
        """
        if self.state_bytes:
            names = [each for name in names for each in (name, state_name(name))]
        for tier in self.tiers.values():
            tier.pinned.hit(names, client)

    @property
    def pinned(self) -> bool:
        """Whether any tier has a pin."""
        return any(len(tier.pinned) for tier in self.tiers.values())

    def flush(self, disk: bool) -> None:
        """Remove all pins, and all pages except those that are being read.

        The disk is cleared only if `disk` is True.
        """
        for place, tier in self.tiers.items():
            tier.pinned.clear()
            if disk or place != "disk":
                tier.flush()


def build_kept(
    config: EngineConfig,
    spec: FamilySpec,
    found: Iterable[tuple[bytes, int]],
    pinned_share: float,
) -> OffloadedPages:
    """Create the index of those tiers of KV pages that `config` enables.

    found: (name, bytes on disk) of each page left by an earlier run, the oldest first.
    """
    pages = config.kv.pages
    each = spec.kv_spec(pages.ranks).with_dtype(config.kv.dtype)
    page_bytes = config.page_size * each.token_bytes(config.dtype) * pages.ranks
    state_bytes = each.state_bytes(config.dtype) * pages.ranks
    return OffloadedPages(
        pages.identity,
        page_bytes,
        state_bytes,
        pages.disk_bytes,
        found,
        pages.host_bytes * pages.ranks,
        pinned_share,
    )
