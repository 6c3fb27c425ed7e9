"""KV pages and sequences' states kept beside the pool: their places by name, and the writes, reads,
placements and removals still to do.

Owns the index. The workers have the bytes, and execute the moves from `take_moves` at the
start of a plan, before anything is computed.

    device ──save──▶ host, disk ──fetch──▶ read ──place──▶ device         (stays below, too)

A page may be in several tiers. A page that leaves one tier stays in the rest. In a chain, pages
nearer to the root are more useful, as a missing page makes everything behind it useless. So a
chain's uses are counted from its end to its root, and its end is evicted first.

In each tier, a client's pins hold within a share of the tier, for present and future pages.
Pins in the tiers outlast a pin on the device that has given way.
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
"""Of any page, per byte: what a chain saves is by its pages, and all have one size."""


class CacheTierState:
    """The book of one tier. counts: pages saved, unsaved and read, and why others were computed
    instead.
    """

    def __init__(
        self,
        budget_bytes: int,
        size: Callable[[int], int],
        pins: PinTable[bytes],
        found: Iterable[tuple[bytes, int]] = (),
    ) -> None:
        """Start with the pages that an earlier run left.

        size: maps bytes to bytes in the tier.

        pins: an empty book, whose share is in bytes in the tier.

        found: (name, bytes in the tier) per page, the oldest first.
        """
        self.pinned = PinnedItems(pins)
        self.book = self.pinned.tier(budget_bytes)
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
        """Return True with anything for the next plan."""
        return bool(self._save or self._place or self._fetch or self._drop or self._forget)

    @property
    def placing(self) -> Collection[bytes]:
        """Pages that were read and are placed by the next plan."""
        return self._place

    def take_moves(self) -> TierMoves:
        """Return the workers' moves, and clear them."""
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
        """Write a page to the tier, unless it is there or too large. Returns the bytes written."""
        name, size = copy.name, self._size(nbytes)
        if name in self.book or size > self.book.budget_bytes:
            return 0
        self.book.put(name, size, WORTH)
        self._remove(gone for gone in self.pinned.make_room(self.book, 0, {name}) if gone != name)
        if name not in self.book:
            return 0
        if name in self._drop:
            del self._drop[name]  # it is still there
            return 0
        self._save[name] = copy
        self.counts["saved"] += 1
        return nbytes

    def fetch(self, name: bytes, place: int, *, state: bool = False) -> None:
        """Begin to read a page held in `book`, for the given place.

        `read`, `lost` or `forget` ends the read and the hold.
        """
        self._fetch[name] = PageCopy(name, place, state)

    def note_read(self, name: bytes, place: int, *, state: bool = False) -> None:
        """Record that a page was read. The next plan copies it to the given slot."""
        self.book.release(name)
        self.counts["read"] += 1
        self._place[name] = PageCopy(name, place, state)

    def lost(self, name: bytes, why: Happened, *, held: bool = True) -> None:
        """Record a failed read. The page counts as missing.

        `held`: a sequence has held the page until now.
        """
        if held:
            self.book.release(name)
        self.counts[why] += 1
        if name in self.book and name not in self.book.held:
            self.book.remove(name)

    def not_saved(self, name: bytes) -> None:
        """Record a failed write. A read in progress will fail too."""
        self.counts["not saved"] += 1
        if name in self.book and name not in self.book.held:
            self.book.remove(name)

    def forget(self, name: bytes, *, reading: bool) -> None:
        """Drop a page that is being read, or was just read, as it is needed no more."""
        if reading:
            self.book.release(name)
        self._place.pop(name, None)
        if self._fetch.pop(name, None) is None:
            self._forget.append(name)

    def pin(self, items: Iterable[tuple[bytes, int]], client: str, seconds: int) -> None:
        """Pin items of these names and bytes for a client, present or future."""
        sized = [(name, self._size(nbytes)) for name, nbytes in items]
        self.pinned.pin(sized, client, seconds)

    def flush(self) -> None:
        """Remove everything except the pages being read just now."""
        self._remove(self.book.clear(self.book.held))

    def _remove(self, names: Iterable[bytes]) -> None:
        for name in names:
            if self._save.pop(name, None) is None:
                self._drop[name] = None


class OffloadedPages:
    """All tiers of kept pages. Implements `cache.page_tiers.PageTiers`."""

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

        `found`: (name, bytes on disk) per page left by an earlier run, the oldest first.

        `pinned_share`: the share of each tier that pins may take.
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
        """Round up to whole pages, as host memory is handed out by the page.

        A state gets one page more, because its parts are aligned.
        """
        pages = -(-nbytes // self.page_bytes) + (nbytes != self.page_bytes)
        return pages * self.page_bytes

    def __contains__(self, name: object) -> bool:
        return any(name in tier for tier in self.tiers.values())

    @property
    def empty(self) -> bool:
        return not any(len(tier.book) for tier in self.tiers.values())

    def where(self, name: bytes) -> PageTier:
        """Return the quickest tier with the page."""
        return next(place for place, tier in self.tiers.items() if name in tier)

    @property
    def moving(self) -> bool:
        """Return True with moves for the next plan."""
        return any(tier.moving for tier in self.tiers.values())

    def take_moves(self) -> PageMoves:
        """Return the workers' moves in all tiers, and clear them."""
        return tuple(
            (place, tier.take_moves()) for place, tier in self.tiers.items() if tier.moving
        )

    def write_page(
        self, name: bytes, page: int, line: int | None, tiers: Iterable[PageTier] = PAGE_TIERS
    ) -> int:
        """Write `page`, and the state after it from `line`, to the tiers without them.

        Returns the bytes written.
        """
        written = self._keep(PageCopy(name, page), self.page_bytes, tiers)
        if line is not None:
            copy = PageCopy(state_name(name), line, True)
            written += self._keep(copy, self.state_bytes, tiers)
        return written

    def _keep(self, copy: PageCopy, nbytes: int, tiers: Iterable[PageTier]) -> int:
        # What is only on its way to its place cannot be written from there.
        if any(copy.name in tier.placing for tier in self.tiers.values()):
            return 0
        return sum(
            self.tiers[place].write_page(copy, nbytes) for place in tiers if place in self.tiers
        )

    def used(self, names: Sequence[bytes]) -> None:
        """Record a use of a chain, from its first page on."""
        for tier in self.tiers.values():
            for name in reversed(names):
                if name in tier:
                    tier.book.use(name, WORTH)

    def pin(self, chain: Sequence[tuple[bytes, bool]], client: str, seconds: int) -> None:
        """Pin a chain for a client in every tier for `seconds`, from its first page on.

        In each tier the pin extends as far as the client's part of the limit. Each page has
        True if a state is kept after it.
        """
        items: list[tuple[bytes, int]] = []
        for name, state in chain:
            items.append((name, self.page_bytes))
            if state:
                items.append((state_name(name), self.state_bytes))
        for tier in self.tiers.values():
            tier.pin(items, client, seconds)

    def hit(self, names: Sequence[bytes], client: str) -> None:
        """Renew a client's pins on a chain, from its first page on."""
        if self.state_bytes:
            names = [each for name in names for each in (name, state_name(name))]
        for tier in self.tiers.values():
            tier.pinned.hit(names, client)

    @property
    def pinned(self) -> bool:
        """Return True with a pin in any tier."""
        return any(len(tier.pinned) for tier in self.tiers.values())

    def flush(self, disk: bool) -> None:
        """Remove all pins, and everything except the pages being read just now.

        The disk is cleared only with `disk`.
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
    """Build the book for KV pages beside the pool."""
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
