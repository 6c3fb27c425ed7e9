"""KV pages beside the device in a simulation: reads that take their time.

The books of the tiers, and what is worth reading, are the serving code's. Owns the counts by tier.
Knows nothing of embeddings or requests' order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from saccade.cache.kept_pages import KeptPages
from saccade.cache.prefix import PrefixCache
from saccade.core.plan import PAGE_TIERS, PageEvent, PageTier, Plan
from saccade.sched.parts.page_arrivals import PageArrivals, ReadRates
from saccade_bench.lab.costs import Costs, Machine
from saccade_bench.lab.outcome import PagesTier


def kept_pages(machine: Machine) -> KeptPages | None:
    """Return the book of the KV tiers, if there are any."""
    pages, each = machine.pages, machine.page_bytes
    if not (pages.disk_bytes or pages.host_bytes):
        return None
    return KeptPages(b"", each, 0, pages.disk_bytes, host_bytes=pages.host_bytes)


class Restoring(Protocol):
    """A replica's pages. restored: prompt tokens back, by tier."""

    @property
    def prefix(self) -> PrefixCache | None: ...

    @property
    def restored(self) -> Mapping[PageTier, int]: ...


def page_tiers(replicas: Iterable[Restoring]) -> dict[str, PagesTier]:
    """Return the sum of all replicas' counts, by tier."""
    sums: dict[str, PagesTier] = {}
    for replica in replicas:
        kept = replica.prefix.kept if replica.prefix else None
        for place, tier in kept.tiers.items() if kept else ():
            old = sums.get(place, PagesTier(0, 0, 0, 0, 0))
            assert kept is not None
            counts = tier.counts
            sums[place] = PagesTier(
                old.restored + replica.restored.get(place, 0),
                old.saved + counts["saved"],
                old.read + counts["read"],
                old.slow + counts["slow"] + counts["late"],
                old.evictions + tier.book.evictions,
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
        self._speeds: dict[PageTier, float] = {"host": costs.host_gbs, "disk": costs.disk_gbs}
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
        for tier, moves in plan.pages:
            for way, copies in (("KV to", moves.save), ("KV from", moves.fetch)):
                if copies:
                    self.moved[f"{way} {tier}"] += len(copies) * self._page_bytes
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
