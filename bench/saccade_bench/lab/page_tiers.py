"""KV pages beside the device in a simulation: reads that take their time step by step, or a queue's
prefix cache whose pages come back at once, at a price.

The books of the tiers, and what is worth reading, are the serving code's. Owns the counts by tier.
Knows nothing of embeddings or requests' order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from saccade.cache.content import Content
from saccade.cache.kept_pages import KeptPages
from saccade.cache.page_names import page_name, root_name
from saccade.cache.pages import PagePool
from saccade.cache.prefix import Node, PrefixCache
from saccade.core.plan import PAGE_TIERS, PageEvent, PageMoves, PageTier, Plan
from saccade.sched.parts.page_arrivals import NO_GAIN, PageArrivals, ReadRates
from saccade_bench.lab.costs import Costs, Machine
from saccade_bench.lab.outcome import PagesTier
from saccade_bench.lab.trace import TracedCall, page_names


def kept_pages(machine: Machine, grain: int | None = None) -> KeptPages | None:
    """The book of the KV tiers, if any, with pages of `grain` tokens instead of the machine's."""
    pages, each = machine.pages, (grain or machine.page_size) * machine.kv_bytes
    if not (pages.disk_bytes or pages.host_bytes):
        return None
    return KeptPages(b"", each, 0, pages.disk_bytes, host_bytes=pages.host_bytes)


def speeds(costs: Costs) -> dict[PageTier, float]:
    """GB/s of reading each tier."""
    return {"host": costs.host_gbs, "disk": costs.disk_gbs}


def count_moves(moved: Counter[str], moves: PageMoves, page_bytes: int) -> None:
    """Add the bytes that a plan moves, by way."""
    for tier, told in (("host", moves.host), ("disk", moves.disk)):
        for way, copies in (("KV to", told.save), ("KV from", told.fetch)):
            if copies:
                moved[f"{way} {tier}"] += len(copies) * page_bytes


class Restoring(Protocol):
    """A replica's pages. restored: prompt tokens back, by tier."""

    @property
    def prefix(self) -> PrefixCache | None: ...

    @property
    def restored(self) -> Mapping[PageTier, int]: ...


def page_tiers(replicas: Iterable[Restoring], machine: Machine) -> dict[str, PagesTier]:
    """The sum of all replicas' counts, by tier, in the machine's pages."""
    sums: dict[str, PagesTier] = {}
    for replica in replicas:
        kept = replica.prefix.kept if replica.prefix else None
        for place, tier in kept.tiers.items() if kept else ():
            old = sums.get(place, PagesTier(0, 0, 0, 0, 0))
            assert kept is not None
            counts, grain = tier.counts, max(1, kept.page_bytes // machine.page_bytes)
            sums[place] = PagesTier(
                old.restored + replica.restored.get(place, 0),
                old.saved + grain * counts["saved"],
                old.read + grain * counts["read"],
                old.slow + grain * (counts["slow"] + counts["late"]),
                old.evictions + grain * tier.book.evictions,
            )
    return sums


class SimulatedRates(ReadRates):
    """The speed of computing is told by the simulation; the scheduler's own clock is a real one."""

    def computed(self, tokens: int, seconds: float) -> None: ...

    def took(self, tokens: int, seconds: float) -> None:
        super().computed(tokens, seconds)


class PageReads:
    """The worker's half of KV tiers, step by step. A tier is read one page after another, beside
    the steps; what is saved is written beside them, too. `now`: in ms. `moved`: bytes, by way.
    """

    def __init__(self, machine: Machine, costs: Costs, arrivals: PageArrivals | None) -> None:
        self.moved: Counter[str] = Counter()
        self.now = 0.0
        self._rates = SimulatedRates()
        self._page_bytes = machine.page_bytes
        self._speeds = speeds(costs)
        self._reading: dict[PageTier, dict[bytes, float]] = {tier: {} for tier in PAGE_TIERS}
        self._free: dict[PageTier, float] = dict.fromkeys(PAGE_TIERS, 0.0)
        if arrivals:
            arrivals.rates = self._rates
            arrivals.clock = lambda: self.now / 1e3

    @property
    def ends(self) -> Iterator[float]:
        """When each read ends."""
        return (end for reads in self._reading.values() for end in reads.values())

    def took(self, plan: Plan, ms: float) -> None:
        """A step takes so long."""
        self._rates.took(sum(row.length for row in plan.rows if row.length > 1), ms / 1e3)

    def carry_out(self, plan: Plan) -> None:
        count_moves(self.moved, plan.pages, self._page_bytes)
        for tier, moves in zip(PAGE_TIERS, (plan.pages.host, plan.pages.disk)):
            for name in moves.forget:
                self._reading[tier].pop(name, None)
            for copy in moves.fetch:
                took = self._page_bytes / self._speeds[tier] / 1e6
                self._free[tier] = max(self.now, self._free[tier]) + took
                self._reading[tier][copy.name] = self._free[tier]

    def ended(self) -> tuple[PageEvent, ...]:
        """The reads that have ended, once."""
        done = [
            (name, tier)
            for tier, reads in self._reading.items()
            for name, end in reads.items()
            if end <= self.now
        ]
        for name, tier in done:
            del self._reading[tier][name]
        return tuple((name, "read", tier) for name, tier in done)


class QueuedPages:
    """One replica's pool and prefix cache, for calls that come one after another; a page is `grain`
    tokens. `moved`: bytes, by way.
    """

    def __init__(self, machine: Machine, costs: Costs, grain: int) -> None:
        self.pool = PagePool(max(2, 1 + machine.kv_tokens // grain), 1)
        kept = kept_pages(machine, grain)
        self.prefix = PrefixCache(self.pool, kept=kept) if machine.prefix_cache else None
        self.moved: Counter[str] = Counter()
        self.restored: Counter[PageTier] = Counter()
        self._grain = grain
        self._page_bytes = grain * machine.kv_bytes
        self._costs = costs
        self._speeds = speeds(costs)

    def take(self, call: TracedCall, length: int) -> tuple[int, float]:
        """Tokens found, and ms of reading some of them from other tiers; all whole pages of the
        call are then cached.
        """
        if self.prefix is None:
            return 0, 0.0
        prefix, pool, grain = self.prefix, self.pool, self._grain
        names = page_names((*call.pieces, call.answer), grain)
        # The prompt's last page is never looked for, so that it may have been begun by something
        # else than it goes on with here.
        path = prefix.find(Content(names[: -(-length // grain)], (), (), call.tenant))
        # The last answer token has no keys and values.
        computed = length + call.answer.length - 1
        content = Content(names, (), (), call.tenant)
        node = prefix.hold(content, path)
        names_back = self._beyond(content, path, (length - 1) // grain)
        missing = -(-computed // grain) - len(path)
        if pool.free < missing:
            prefix.evict(missing - pool.free)
        pages = [step.page for step in path]
        pages += pool.take(missing, pages[-1] if pages else None)
        reading = self._restore(path, names_back, pages)
        prefix.leave(node, content, pages, computed // grain)
        self._save()
        return (len(path) + len(names_back)) * grain, reading

    def _beyond(self, content: Content, path: Sequence[Node], most: int) -> list[bytes]:
        """Names of pages after `path` that are worth their reading, held in their tiers; none after
        the first `most` of the prompt.
        """
        prefix, kept = self.prefix, self.prefix.kept if self.prefix else None
        if prefix is None or kept is None or kept.empty:
            return []
        name = prefix.name(path[-1]) if path else root_name(kept.identity, *content.partition)
        names: list[bytes] = []
        for index in range(len(path), most):
            name = page_name(name, content.page(index, 1))
            if name not in kept:
                break
            names.append(name)
        places, start, end = [kept.where(name) for name in names], len(path) * self._grain, 0
        for upto in range(len(names), 0, -1):  # all, or what lies in the quicker tier alone
            if upto < len(names) and places[upto] == places[upto - 1]:
                continue
            computing = self._costs.prefill_ms(start, upto * self._grain)
            if self._reading_ms(places[:upto]) < NO_GAIN * computing:
                end = upto
                break
        for place in places[end:]:
            kept.tiers[place].counts["slow"] += 1
        for name, place in zip(names[:end], places):
            kept.tiers[place].book.hold(name)
        return names[:end]

    def _reading_ms(self, places: Sequence[PageTier]) -> float:
        """Milliseconds for a page from each of these."""
        return sum(self._page_bytes / self._speeds[place] / 1e6 for place in places)

    def _restore(self, path: Sequence[Node], names: list[bytes], pages: list[int]) -> float:
        """Read pages into their places behind `path`; returns the ms."""
        if not (names and self.prefix and self.prefix.kept):
            return 0.0
        kept = self.prefix.kept
        places = [kept.where(name) for name in names]
        for name, place, page in zip(names, places, pages[len(path) :]):
            kept.tiers[place].fetch(name, page)
            kept.tiers[place].read(name, page)
            self.restored[place] += self._grain
        kept.used([*map(self.prefix.name, path), *names])
        return self._reading_ms(places)

    def _save(self) -> None:
        """What was left is on disk within seconds."""
        if self.prefix is None or self.prefix.kept is None:
            return
        self.prefix.save(1 << 62)
        count_moves(self.moved, self.prefix.kept.take_moves(), self._page_bytes)
