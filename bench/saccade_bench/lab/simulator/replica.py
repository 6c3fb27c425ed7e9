"""One simulated server: the real scheduler and caches, with simulated durations of steps and of
loading pixels and KV pages.

Every plan is made by the real scheduler, one at a time. The simulation simplifies two things: a
cancelled image is still decoded, and encoding never overlaps with the language model.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.plan import PAGE_TIERS, DiskEvent, Open, PageEvent, PageTier, Plan, StepResult
from saccade.core.types import Delta, ImageKey, Request
from saccade.plugins.tiers.kept_pages import OffloadedPages
from saccade.plugins.tiers.page_arrivals import PageArrivals, ReadRates
from saccade.sched.parts.page_loads import PageLoads
from saccade.sched.scheduler import GenerationScheduler
from saccade_bench.lab.simulator.costs import Costs, Machine
from saccade_bench.lab.simulator.traces import Shown

Tiers = dict[str, Counter[str]]
"""Counts by cache tier."""


class Replica:
    """A simulated server. Times are in ms.

    Call `submit` and `arrived` at any time, `begin` when no step is in flight, and `end` at the
    time that it returned.
    """

    def __init__(self, machine: Machine, costs: Costs) -> None:
        pages = max(2, 1 + machine.kv_tokens // machine.page_size)
        pool = PagePool(pages, machine.page_size)
        self.embeddings = EmbeddingCache(machine.budgets, machine.embedding_bytes)
        limits = replace(machine.limits, arena_bytes=machine.arena_bytes)
        prefix = PrefixCache(pool, kept=_kept_pages(machine)) if machine.prefix_cache else None
        self.scheduler = GenerationScheduler(limits, pool, prefix, self.embeddings, ())
        self.busy = 0.0
        self.calls = 0  # requests sent to it and not yet answered
        self.stepping = False
        self.moved: Counter[str] = Counter()  # bytes, by source and target
        self.shown: dict[ImageKey, Shown] = {}  # all images of requests
        self._costs = costs
        self._machine = machine
        self._decoded = 0
        self._workers = [0.0] * costs.workers  # when each image worker is free
        self._seats: dict[int, Open] = {}
        self._reads: list[tuple[float, ImageKey]] = []  # end of each read from disk
        self._pages = _PageReads(machine, costs, self.scheduler.loads)
        self._flight: tuple[Plan, float] | None = None

    def submit(self, request: Request) -> list[Delta]:
        return self.scheduler.add_request(request)

    def arrived(self, key: ImageKey) -> tuple[Delta, ...]:
        """Record that the pixels of a `wanted` image are available. Returns no deltas."""
        self.scheduler.pixels_ready(key)
        return ()

    def begin(self, now: float) -> float | None:
        """Start a step. Return when it ends, or None if there is no work."""
        self._pages.now = now
        plan = self.scheduler.plan()
        if plan.empty:
            return None
        for slot in plan.close:
            self._seats.pop(slot, None)
        self._seats.update((entry.slot, entry) for entry in plan.open)
        took = self._step_ms(plan, now)
        self.busy += 0.0 if plan.wait else took
        self._pages.rates.took(sum(row.length for row in plan.rows if row.length > 1), took / 1e3)
        self._flight = plan, now + took
        self.stepping = True
        return now + took

    def end(self, answers: dict[int, tuple[int, ...]]) -> list[Delta]:
        """End the step in flight. `answers` has the output token ids by sampling seed."""
        assert self._flight is not None
        (plan, now), self._flight, self.stepping = self._flight, None, False
        self._pages.now = now
        tokens = []
        for row in plan.rows:
            if row.sample:
                seat = self._seats[row.slot]
                answer = answers[seat.sampling.seed]
                tokens.append(answer[row.start + row.length - seat.prompt_length])
        events: tuple[DiskEvent, ...] = tuple(
            (key, "read") for end, key in self._reads if end <= now
        )
        self._reads = [read for read in self._reads if read[0] > now]
        encoded = tuple((encode.key, 0.0, now) for encode in plan.encode)
        return self.scheduler.apply(
            StepResult(
                plan.step,
                tuple(tokens),
                encoded=encoded,
                disk=events,
                pages=self._pages.take_ended(),
            )
        )

    def wanted(self, now: float) -> list[tuple[float, ImageKey]]:
        """Return the images that the engine now requests, with the time at which each is ready."""
        arrivals = []
        for key, _ in self.scheduler.take_notices().want:
            shown = self.shown[key]
            begin = max(now, heapq.heappop(self._workers))
            end = begin + self._costs.decode_ms(shown.pixels, shown.resized)
            heapq.heappush(self._workers, end)
            self._decoded += 1
            self.moved["pixels to engine"] += 3 * shown.resized
            arrivals.append((end, key))
        return arrivals

    def counts(self) -> Counter[str]:
        """Counts of this replica. The caller counts requests and images."""
        counts, prefix = self.scheduler.counts, self.scheduler.prefix
        return Counter(
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            images_kv=counts.images_kv,
            images_embedding=counts.images_embedding,
            images_encoded=counts.images_encoded,
            images_decoded=self._decoded,
            pixels_reused=counts.images_pixels,
            patches_encoded=counts.patches_encoded,
            pages_evicted=prefix.evictions if prefix else 0,
            preemptions=counts.preemptions,
        )

    def embedding_tiers(self) -> Tiers:
        cache = self.embeddings
        return {
            tier: Counter(
                hits=cache.hits[tier], misses=cache.misses[tier], evictions=shelf.evictions
            )
            for tier, shelf in cache.tiers.items()
        }

    def page_tiers(self) -> Tiers:
        """Counts of offloaded KV pages by tier. `slow` pages were recomputed because reading them
        took, or would have taken, longer. `restored` counts prompt tokens loaded from the tier.
        """
        prefix, restored = self.scheduler.prefix, self.scheduler.counts.restored_tokens
        kept = prefix.kept if prefix else None
        return {
            name: Counter(
                restored=restored.get(name, 0),
                saved=tier.counts["saved"],
                read=tier.counts["read"],
                slow=tier.counts["slow"] + tier.counts["late"],
                evictions=tier.book.evictions,
            )
            for name, tier in (kept.tiers.items() if isinstance(kept, OffloadedPages) else ())
        }

    def _step_ms(self, plan: Plan, now: float) -> float:
        costs = self._costs
        sizes = [encode.patches for encode in plan.encode]
        took = costs.encode_ms(sizes) + self._move_ms(plan, now)
        for row in plan.rows:
            if row.start >= self._seats[row.slot].prompt_length:
                took += costs.row + row.start * costs.context
            else:
                took += costs.prefill_ms(row.start, row.length)
        if plan.rows or plan.encode:
            took += costs.step
        self._pages.carry_out(plan, self.moved)
        ends = [*(end for end, _ in self._reads), *self._pages.ends()]
        return max(took, min(ends) - now) if plan.wait else took

    def _move_ms(self, plan: Plan, now: float) -> float:
        """Return how long the step waits for copies. Reads from disk run in the background, one
        after another.
        """
        took = 0.0
        for move in plan.moves:
            if move.target is None:
                continue
            nbytes = move.num_tokens * self._machine.embedding_bytes
            self.moved[f"{move.source} to {move.target}"] += nbytes
            if move.source == "disk":
                begin = max([now, *(end for end, _ in self._reads)])
                self._reads.append((begin + nbytes / self._costs.disk_gbs / 1e6, move.key))
            else:
                took += nbytes / self._costs.host_gbs / 1e6
        return took


# ---- KV pages in offload tiers


def _kept_pages(machine: Machine) -> OffloadedPages | None:
    pages = machine.pages
    if not (pages.disk_bytes or pages.host_bytes):
        return None
    return OffloadedPages(b"", machine.page_bytes, 0, pages.disk_bytes, host_bytes=pages.host_bytes)


class _SimulatedRates(ReadRates):
    """Read rates with the simulated speed of prefill, instead of one measured in real time."""

    def computed(self, tokens: int, seconds: float) -> None: ...

    def took(self, tokens: int, seconds: float) -> None:
        super().computed(tokens, seconds)


class _PageReads:
    """Simulates the worker's reads and writes of offloaded KV pages.

    Each tier is read one page at a time, concurrently with steps. Writes take no time. `now` is in
    ms.
    """

    def __init__(self, machine: Machine, costs: Costs, loads: PageLoads | None) -> None:
        self.now = 0.0
        self.rates = _SimulatedRates()
        self._page_bytes = machine.page_bytes
        self._speeds: dict[PageTier, float] = {"host": costs.host_gbs, "disk": costs.disk_gbs}
        self._reading: dict[PageTier, dict[bytes, float]] = {tier: {} for tier in PAGE_TIERS}
        self._free: dict[PageTier, float] = dict.fromkeys(PAGE_TIERS, 0.0)
        if isinstance(loads, PageArrivals):
            loads.rates = self.rates
            loads.clock = lambda: self.now / 1e3

    def ends(self) -> Iterable[float]:
        """The time at which each read ends."""
        return (end for reads in self._reading.values() for end in reads.values())

    def carry_out(self, plan: Plan, moved: Counter[str]) -> None:
        for tier, moves in plan.pages:
            for direction, copies in (("KV to", moves.save), ("KV from", moves.fetch)):
                if copies:
                    moved[f"{direction} {tier}"] += len(copies) * self._page_bytes
            for name in moves.forget:
                self._reading[tier].pop(name, None)
            for copy in moves.fetch:
                took = self._page_bytes / self._speeds[tier] / 1e6
                self._free[tier] = max(self.now, self._free[tier]) + took
                self._reading[tier][copy.name] = self._free[tier]

    def take_ended(self) -> tuple[PageEvent, ...]:
        """Return and remove the reads that have ended."""
        done = [
            (name, tier)
            for tier, reads in self._reading.items()
            for name, end in reads.items()
            if end <= self.now
        ]
        for name, tier in done:
            del self._reading[tier][name]
        return tuple((name, "read", tier) for name, tier in done)
