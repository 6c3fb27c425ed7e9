"""One simulated server: the real scheduler and caches; pixels that take time to come; steps that
take as long as they cost.

Owns what stands in for tensors and decode workers. Every plan is the real scheduler's; only its
duration is estimated. Two things are
simpler than life: the arena is never full of pictures in use, and encoding never overlaps with the
language model.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lab.costs import Costs, Machine
from lab.outcome import StepCounts
from lab.trace import Shown
from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.plan import DiskEvent, Open, PixelSlot, Plan, Row, Sampled
from saccade.core.types import Delta, ImageKey, Request
from saccade.sched.scheduler import Scheduler


@dataclass(slots=True)
class _Pixels:
    """Of one picture: when they are there, and how often the engine holds them.

    `used`: it has had them before.
    """

    shown: Shown
    ready: float
    leases: int = 0
    used: bool = False


class PixelStage:
    """The front's half of a picture's path: decode workers, and decoded pictures that are kept
    while there is room.
    """

    def __init__(self, costs: Costs, room: int) -> None:
        self._costs = costs
        self._room = room
        self._workers = [0.0] * costs.workers  # when each is free
        self._known: dict[ImageKey, Shown] = {}
        self._kept: OrderedDict[ImageKey, _Pixels] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._confirmed: set[ImageKey] = set()
        self.decoded = 0
        self.reused = 0
        self.shipped = 0

    def name(self, pictures: Iterable[Shown]) -> None:
        """A request shows these: what follows may name them by key."""
        self._known.update((shown.image.key, shown) for shown in pictures)

    def decode_ahead(self, keys: Iterable[ImageKey], now: float) -> None:
        """Begin with what the engine has never confirmed."""
        for key in keys:
            if key not in self._confirmed and key not in self._kept:
                self._decode(key, now)

    def lease(self, key: ImageKey, now: float) -> float:
        """The engine wants it. Returns when the pixels are there."""
        if key not in self._kept:
            self._decode(key, now)
        pixels = self._kept[key]
        self.reused += pixels.used
        pixels.leases += 1
        pixels.used = True
        self.shipped += 3 * pixels.shown.resized
        return max(now, pixels.ready)

    def release(self, key: ImageKey) -> None:
        """The engine has finished with it."""
        self._kept[key].leases -= 1
        self._kept.move_to_end(key)
        self._make_room()

    def confirm(self, keys: Iterable[ImageKey]) -> None:
        self._confirmed.update(keys)

    def _decode(self, key: ImageKey, now: float) -> None:
        shown = self._known[key]
        begin = max(now, heapq.heappop(self._workers))
        end = begin + self._costs.decode_ms(shown.pixels, shown.resized)
        heapq.heappush(self._workers, end)
        self._kept[key] = _Pixels(shown, end)
        self._bytes += 3 * shown.resized
        self.decoded += 1
        self._make_room()

    def _make_room(self) -> None:
        if self._bytes <= self._room:
            return
        for key in [key for key, pixels in self._kept.items() if pixels.used and not pixels.leases]:
            self._bytes -= 3 * self._kept.pop(key).shown.resized
            if self._bytes <= self._room:
                return


class Replica:
    """`submit` and `pixels_ready` at any time; `begin` a step when none is under way, `end` it when
    its time has come.
    """

    def __init__(self, machine: Machine, costs: Costs, cache: type[EmbeddingCache]) -> None:
        pages = max(2, 1 + machine.kv_tokens // machine.page_size)
        pool = PagePool(pages, machine.page_size)
        self.embeddings = cache(machine.budgets, machine.embedding_bytes)
        limits = replace(
            machine.limits, arena_patches=machine.arena_bytes // (3 * machine.rules.patch**2)
        )
        self.scheduler = Scheduler(
            limits, pool, PrefixCache(pool) if machine.prefix_cache else None, self.embeddings, ()
        )
        self.pixels = PixelStage(costs, machine.arena_bytes)
        self.busy = 0.0
        self.stepping = False
        self.moved: Counter[str] = Counter()
        self._costs = costs
        self._machine = machine
        self._seats: dict[int, Open] = {}
        self._slots: dict[int, ImageKey] = {}  # pixels that the engine holds, by offset
        self._reads: list[tuple[float, ImageKey]] = []  # from disk: when each ends
        self._flight: tuple[Plan, float] | None = None

    def submit(self, request: Request, now: float) -> list[Delta]:
        self.pixels.decode_ahead((image.key for image in request.images), now)
        return self.scheduler.add(request)

    def pixels_ready(self, key: ImageKey) -> None:
        offset = max(self._slots, default=-1) + 1
        self._slots[offset] = key
        self._give_back(self.scheduler.pixels_ready(key, PixelSlot(offset, 1, 1)))

    def begin(self, now: float) -> float | None:
        """Plan a step; returns when it will end, None if there is nothing to do."""
        plan = self.scheduler.plan()
        if plan.empty:
            return None
        for slot in plan.close:
            self._seats.pop(slot, None)
        self._seats.update((entry.slot, entry) for entry in plan.open)
        took = self._step_ms(plan, now)
        self.busy += 0.0 if plan.wait else took
        self._flight = plan, now + took
        self.stepping = True
        return now + took

    def end(self, answers: dict[int, tuple[int, ...]]) -> list[Delta]:
        """`answers`: token ids by sampling seed."""
        assert self._flight is not None
        (plan, now), self._flight, self.stepping = self._flight, None, False
        tokens = tuple(self._drawn(row, answers) for row in plan.rows if row.sample)
        done = [key for end, key in self._reads if end <= now]
        self._reads = [read for read in self._reads if read[0] > now]
        events: tuple[DiskEvent, ...] = tuple((key, "read") for key in done)
        return self.scheduler.apply(plan, Sampled(tokens, (None,) * len(tokens), disk=events))

    def wanted(self, now: float) -> list[tuple[float, ImageKey]]:
        """Pixels that the engine now asks for, and when each will be there."""
        notices = self.scheduler.take_notices()
        self._give_back(notices.done)
        self.pixels.confirm(notices.confirmed)
        return [(self.pixels.lease(key, now), key) for key in notices.want]

    def counts(self) -> StepCounts:
        """What has happened here; pictures and requests are counted by who sends them."""
        counts, prefix = self.scheduler.counts, self.scheduler.prefix
        moved = {**self.moved, "pixels to engine": self.pixels.shipped}
        return StepCounts(
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            images_kv=counts.images_kv,
            images_embedding=counts.images_embedding,
            images_encoded=counts.images_encoded,
            images_decoded=self.pixels.decoded,
            pixels_reused=self.pixels.reused,
            patches_encoded=counts.patches_encoded,
            pages_evicted=prefix.evictions if prefix else 0,
            preemptions=counts.preemptions,
            moved=moved,
        )

    def _drawn(self, row: Row, answers: dict[int, tuple[int, ...]]) -> int:
        seat = self._seats[row.slot]
        return answers[seat.sampling.seed][row.start + row.length - seat.prompt_length]

    def _give_back(self, slots: Iterable[PixelSlot]) -> None:
        for slot in slots:
            self.pixels.release(self._slots.pop(slot.offset))

    def _step_ms(self, plan: Plan, now: float) -> float:
        costs = self._costs
        took = costs.encode_ms(
            t * h * w for t, h, w in (encode.grid for encode in plan.encode)
        ) + self._move_ms(plan, now)
        for row in plan.rows:
            if row.start >= self._seats[row.slot].prompt_length:
                took += costs.row + row.start * costs.context
            else:
                took += costs.prefill_ms(row.start, row.length)
        if plan.rows or plan.encode:
            took += costs.step
        return max(took, min(end for end, _ in self._reads) - now) if plan.wait else took

    def _move_ms(self, plan: Plan, now: float) -> float:
        """What the step waits for. Reads from disk run beside it, one after another."""
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
