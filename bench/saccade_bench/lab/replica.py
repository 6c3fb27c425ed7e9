"""One simulated server: the real scheduler and caches; pixels that take time to come; steps that
take as long as they cost.

Owns the stand-ins for tensors and image workers. Every plan is the real scheduler's, one at a time;
only its duration is estimated. Two things are simpler than life: a cancelled image is decoded all
the same, and encoding never overlaps with the language model.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.plan import DiskEvent, Open, PageTier, Plan, Row, StepResult
from saccade.core.types import Delta, ImageKey, Request
from saccade.sched.scheduler import GenerationScheduler
from saccade_bench.lab.costs import Costs, Machine
from saccade_bench.lab.outcome import StepCounts
from saccade_bench.lab.page_tiers import PageReads, kept_pages
from saccade_bench.lab.trace import Shown


class PixelStage:
    """The front's half of an image's path: image workers, each with one image at a time."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._workers = [0.0] * costs.workers  # when each is free
        self._known: dict[ImageKey, Shown] = {}
        self.decoded = 0
        self.shipped = 0

    @property
    def named(self) -> set[ImageKey]:
        """All that was ever shown."""
        return set(self._known)

    def name(self, pictures: Iterable[Shown]) -> None:
        """Name a request's images, for later use by key."""
        self._known.update((shown.image.key, shown) for shown in pictures)

    def decode(self, key: ImageKey, now: float) -> float:
        """The engine wants pixels. Returns the time of their arrival."""
        shown = self._known[key]
        begin = max(now, heapq.heappop(self._workers))
        end = begin + self._costs.decode_ms(shown.pixels, shown.resized)
        heapq.heappush(self._workers, end)
        self.decoded += 1
        self.shipped += 3 * shown.resized
        return end


class Replica:
    """`submit` and `arrived` at any time; `begin` a step when none is under way, `end` it at its
    time.
    """

    def __init__(self, machine: Machine, costs: Costs) -> None:
        pages = max(2, 1 + machine.kv_tokens // machine.page_size)
        pool = PagePool(pages, machine.page_size)
        self.embeddings = EmbeddingCache(machine.budgets, machine.embedding_bytes)
        limits = replace(machine.limits, arena_bytes=machine.arena_bytes)
        prefix = PrefixCache(pool, kept=kept_pages(machine)) if machine.prefix_cache else None
        self.scheduler = GenerationScheduler(limits, pool, prefix, self.embeddings, ())
        self.pixels = PixelStage(costs)
        self.busy = 0.0
        self.calls = 0  # that it has been sent and has not answered
        self.stepping = False
        self.moved: Counter[str] = Counter()
        self._costs = costs
        self._machine = machine
        self._seats: dict[int, Open] = {}
        self._reads: list[tuple[float, ImageKey]] = []  # from disk: when each ends
        self._pages = PageReads(machine, costs, self.scheduler.arrivals)
        self._flight: tuple[Plan, float] | None = None

    @property
    def prefix(self) -> PrefixCache | None:
        return self.scheduler.prefix

    @property
    def restored(self) -> Mapping[PageTier, int]:
        """Prompt tokens back from other tiers, by tier."""
        return self.scheduler.counts.restored_tokens

    def submit(self, request: Request) -> list[Delta]:
        return self.scheduler.add_request(request)

    def arrived(self, key: ImageKey) -> None:
        """A `wanted` image has arrived."""
        self.scheduler.pixels_ready(key)

    def begin(self, now: float) -> float | None:
        """Plan a step; returns its end, or None without work."""
        self._pages.now = now
        plan = self.scheduler.plan()
        if plan.empty:
            return None
        for slot in plan.close:
            self._seats.pop(slot, None)
        self._seats.update((entry.slot, entry) for entry in plan.open)
        took = self._step_ms(plan, now)
        self.busy += 0.0 if plan.wait else took
        self._pages.took(plan, took)
        self._flight = plan, now + took
        self.stepping = True
        return now + took

    def end(self, answers: dict[int, tuple[int, ...]]) -> list[Delta]:
        """`answers`: token ids by sampling seed."""
        assert self._flight is not None
        (plan, now), self._flight, self.stepping = self._flight, None, False
        self._pages.now = now
        tokens = tuple(self._drawn(row, answers) for row in plan.rows if row.sample)
        done = [key for end, key in self._reads if end <= now]
        self._reads = [read for read in self._reads if read[0] > now]
        events: tuple[DiskEvent, ...] = tuple((key, "read") for key in done)
        encoded = tuple((encode.key, 0.0, now) for encode in plan.encode)
        return self.scheduler.apply(
            StepResult(
                plan.step,
                tokens,
                encoded=encoded,
                disk=events,
                pages=self._pages.ended(),
            )
        )

    def wanted(self, now: float) -> list[tuple[float, ImageKey]]:
        """The images that the engine now asks for, with the time of each arrival."""
        want = self.scheduler.take_notices().want
        return [(self.pixels.decode(key, now), key) for key, _ in want]

    def counts(self) -> StepCounts:
        """Counts of this replica; the sender counts images and requests."""
        counts, prefix = self.scheduler.counts, self.scheduler.prefix
        moved = {**self.moved, **self._pages.moved, "pixels to engine": self.pixels.shipped}
        return StepCounts(
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            images_kv=counts.images_kv,
            images_embedding=counts.images_embedding,
            images_encoded=counts.images_encoded,
            images_decoded=self.pixels.decoded,
            pixels_reused=counts.images_pixels,
            patches_encoded=counts.patches_encoded,
            pages_evicted=prefix.evictions if prefix else 0,
            preemptions=counts.preemptions,
            moved=moved,
        )

    def _drawn(self, row: Row, answers: dict[int, tuple[int, ...]]) -> int:
        seat = self._seats[row.slot]
        return answers[seat.sampling.seed][row.start + row.length - seat.prompt_length]

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
        self._pages.carry_out(plan)
        ends = [*(end for end, _ in self._reads), *self._pages.ends]
        return max(took, min(ends) - now) if plan.wait else took

    def _move_ms(self, plan: Plan, now: float) -> float:
        """The waiting time of the step. Reads from disk run beside it, one after another."""
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
