"""Loads KV pages from host memory and disk for waiting sequences.

An arrival is one load of a chain of pages. Until it ends, it owns the pages that it has allocated
in the pool, and pins the nodes of the path before them. When it ends, the prefix cache takes over
its pages.

A read is started only if it is worth the wait. Only the arrival's sequence and others that need the
same pages wait. Each page is read once. Pages that are missing, damaged or late are computed. An
arrival is late if its pages could have been computed by then, at the measured rates of tokens and
bytes per second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from saccade.cache.content import state_name
from saccade.cache.prefix import Node
from saccade.core.metrics import Metrics
from saccade.core.plan import (
    PAGE_OUTCOMES,
    Happened,
    PageEvent,
    PageMoves,
    PageTier,
    StepResult,
)
from saccade.core.types import ImageOutcome
from saccade.plugins.tiers.kept_pages import CacheTierState, OffloadedPages
from saccade.sched.builder import InFlightPlan
from saccade.sched.limits import Counts
from saccade.sched.parts.step_part import PartContext
from saccade.sched.sequence import Sequence

IDLE_SAVE_BYTES = 64 << 20
"""Maximum bytes that are saved in an idle step. A request that arrives during the copies is
delayed.
"""
STATE = -1
"""The index in `Arrival.reading` that denotes the state after the last page."""
STALL_SECONDS = 10.0
"""Seconds without an update after which the disk is assumed to hang, even if its rate is
unknown.
"""
SMOOTH = 0.3
"""The weight of a new measurement in the moving average."""
FEWEST_TOKENS = 16
"""Minimum prompt tokens in a step whose duration is measured."""
FIRST_SECONDS = 0.02
"""Expected seconds until the first page is read, independent of its size. Rates do not
include it.
"""
LEAST = 1e-12
"""The lower bound of a measured rate in seconds per byte. 0.0 means unmeasured."""
NO_GAIN = 0.9
"""A read is started if it should take less than this fraction of the time for computing the
tokens.
"""
NONE: Mapping[PageTier, float] = {}


Bytes = Mapping[PageTier, int]


@dataclass(slots=True)
class ReadRates:
    """Moving averages of the time for computing a token, and for reading a byte from each tier."""

    token_seconds: float = 0.0  # to compute a prompt token, or 0.0 while unmeasured
    byte_seconds: dict[PageTier, float] = field(default_factory=dict)  # per byte read, by tier

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a step with `tokens` prompt tokens that took `seconds`."""
        if tokens >= FEWEST_TOKENS:
            self.token_seconds = _mean(self.token_seconds, seconds / tokens)

    def record_read(self, tier: PageTier, nbytes: int, seconds: float) -> None:
        """Record a read of `nbytes` that took `seconds`."""
        each = max(LEAST, (seconds - FIRST_SECONDS) / nbytes)
        self.byte_seconds[tier] = _mean(self.byte_seconds.get(tier, 0.0), each)

    def doubt(self, tier: PageTier) -> None:
        """Lower the measured cost of a tier after a decision not to read from it, so that it is
        tried again.
        """
        if tier in self.byte_seconds:
            self.byte_seconds[tier] *= NO_GAIN

    def pays(self, tokens: int, nbytes: Bytes, measured: Mapping[PageTier, float] = NONE) -> bool:
        """Return True if reading `nbytes` is faster than computing `tokens`, or if either rate is
        unknown.

        measured: seconds per byte of the reads in question, instead of the average.
        """
        rates = self.byte_seconds | dict(measured)
        if not self.token_seconds or not nbytes.keys() & rates.keys():
            return True
        reading = sum(count * rates.get(tier, 0.0) for tier, count in nbytes.items())
        return reading < NO_GAIN * tokens * self.token_seconds


def _mean(before: float, now: float) -> float:
    return now if not before else before + SMOOTH * (now - before)


@dataclass(slots=True)
class Restore:
    """Records which of a sequence's pages were loaded, and from which tier."""

    names: list[bytes] = field(default_factory=list)  # the keys of the prompt's pages, so far
    done: bool = False  # nothing more is loaded for this sequence
    start: int = 0  # the index of the first loaded token
    # the tier that each loaded page came from
    tiers: list[PageTier] = field(default_factory=list)

    def tier(self, token: int, page_size: int) -> PageTier | None:
        """Return the tier that a token was loaded from, or None if it was on the device."""
        page = (token - self.start) // page_size
        return self.tiers[page] if 0 <= page < len(self.tiers) else None

    def tokens(self, cached: int, page_size: int) -> Counter[PageTier]:
        """Count the loaded tokens among the first `cached` tokens, by tier."""
        found: Counter[PageTier] = Counter()
        for page, tier in enumerate(self.tiers):
            first = self.start + page * page_size
            found[tier] += max(0, min(first + page_size, cached) - first)
        return +found


@dataclass(slots=True, eq=False)
class Arrival:
    """One load of the pages `names`, in order. The first one is page `depth` of the sequence."""

    sequence: Sequence
    held: Node  # the last node of the path before them
    depth: int
    pages: list[int]  # the path's pages, then those allocated for `names`
    names: list[bytes]
    tiers: dict[bytes, PageTier]  # the source of each page, and of the state
    line: int | None  # the slot of the state after the last page; None for models without states
    begun: float  # the time of its start
    whole: int  # the number of leading pages of `names` that can still be loaded
    heard: dict[PageTier, float] = field(default_factory=dict)  # time of the last update, by tier
    came: Counter[PageTier] = field(default_factory=Counter)  # number of pages loaded, by tier
    # the pending pages, with their index in `names`
    reading: dict[bytes, int] = field(default_factory=dict)

    @property
    def state(self) -> bytes | None:
        return None if self.line is None else state_name(self.names[-1])


class PageArrivals:
    """All loads in progress. Implements `sched.parts.page_loads.PageLoads`.

    The tiers' `counts` have the outcome of each page. This class counts `late` and `slow`: pages
    that are computed because reading them took, or would have taken, longer.
    """

    def __init__(self, context: PartContext, clock: Callable[[], float] = time.monotonic) -> None:
        assert context.prefix is not None and isinstance(context.prefix.kept, OffloadedPages)
        self.rates = ReadRates()
        self.kept = context.prefix.kept
        self._pool = context.pool
        self._prefix = context.prefix
        self.clock = clock
        self._applied = 0.0  # the time of the last applied plan
        self._restores: WeakKeyDictionary[Sequence, Restore] = WeakKeyDictionary()
        self._under_way: dict[Sequence, Arrival] = {}
        self._by_name: dict[bytes, Arrival] = {}

    @property
    def busy(self) -> bool:
        """Whether a load is in progress."""
        return bool(self._under_way)

    @property
    def holders(self) -> Iterator[list[int]]:
        """Yield a list of the pool's pages for each load that uses them."""
        return (arrival.pages for arrival in self._under_way.values())

    @property
    def lines(self) -> Iterator[int]:
        """Yield the slots allocated for the states of loads."""
        return (each.line for each in self._under_way.values() if each.line is not None)

    # ---- finding pages

    def of(self, sequence: Sequence) -> Restore:
        """Return the record of the pages that were loaded for a sequence."""
        if (restore := self._restores.get(sequence)) is None:
            restore = self._restores[sequence] = Restore()
        return restore

    def beyond(self, sequence: Sequence, path: Seq[Node]) -> list[bytes]:
        """Return the names of the pages after `path` that can be loaded for a waiting sequence.

        Empty once the sequence's loads are done. For a model with states, the list ends at the
        last page that has a state.
        """
        restore, size = self.of(sequence), self._pool.page_size
        most = min(len(sequence.tokens) - 1, sequence.shareable) // size
        if restore.done or self.kept.empty or len(path) >= most:
            return []
        names, known = restore.names, len(path)
        if names[known - 1 : known] != [self._prefix.name(node) for node in path[-1:]]:
            names[:] = map(self._prefix.name, path)  # the path has grown, or has other tiles' keys
        found: list[bytes] = []
        for index in range(known, most):
            if index == len(names) or names[index] not in self.kept:
                # Tiers change, and a page's key may depend on tiles that were unknown before.
                del names[index:]
                parent = names[-1] if names else None
                name = self._prefix.stored_name(parent, sequence.content, index)
                if name not in self.kept:
                    break
                names.append(name)
            found.append(names[index])
        if self._prefix.snapshots is not None:
            while found and not self._resumes(found[-1]):
                found.pop()
        return found

    def count_coming(self, sequence: Sequence, path: Seq[Node]) -> int:
        return len(self.beyond(sequence, path))

    # ---- starting reads

    def awaits(self, sequence: Sequence, path: Seq[Node], has_room: Callable[[], bool]) -> bool:
        """Start the reads that are worth waiting for, and return True if the sequence has to wait.

        Implements `PageLoads.awaits`.
        """
        if self._comes(sequence):
            return True
        found = self.beyond(sequence, path)
        names = self.worth(found)
        sequence.account.slow_reads = len(names) < len(found)
        if names:
            if not has_room():
                return False  # no page is requested before the sequence can be admitted
            if self.begin_reads(sequence, path, names):
                return True
        self.of(sequence).done = True
        sequence.match(len(path) * self._pool.page_size)
        return False

    def _comes(self, sequence: Sequence) -> bool:
        """Return True if pages are being loaded for this sequence, or for another one that needs
        the same pages.
        """
        if sequence in self._under_way:
            return True
        restore = self.of(sequence)
        return not restore.done and any(name in self._by_name for name in restore.names)

    def worth(self, names: list[bytes]) -> list[bytes]:
        """Return the leading pages of `names` that are worth waiting for. The others are counted as
        `slow`.
        """
        places = [self.kept.where(name) for name in names]
        size, page_bytes = self._pool.page_size, self.kept.page_bytes
        ahead = Counter(arrival.tiers[name] for name, arrival in self._by_name.items())
        ends = [i for i in range(len(names)) if i + 1 == len(names) or places[i] != places[i + 1]]
        for end in (i + 1 for i in reversed(ends)):
            pages = ahead + Counter(places[:end])
            nbytes = {tier: count * page_bytes for tier, count in pages.items()}
            if self._resumes(names[end - 1]) and self.rates.pays(end * size, nbytes):
                break
        else:
            end = 0
        for tier, count in Counter(places[end:]).items():
            self.kept.tiers[tier].counts["slow"] += count
            self.rates.doubt(tier)
        return names[:end]

    def _resumes(self, name: bytes) -> bool:
        """Return True if a sequence can resume after page `name`. For a model with states, this
        requires a state after the page.
        """
        return self._prefix.snapshots is None or state_name(name) in self.kept

    def begin_reads(self, sequence: Sequence, path: Seq[Node], names: list[bytes]) -> bool:
        """Start reading the pages `names`, which follow `path`, as far as the pool has free pages.

        Returns False if there is no free page, or no free slot for the state.
        """
        pages, line = [node.page for node in path], None
        held = self._prefix.hold(sequence.content, path)  # keep the path from being evicted below
        awaited = [*names, *([state_name(names[-1])] if self._prefix.snapshots is not None else [])]
        tiers = {name: self.kept.where(name) for name in awaited}
        for name in awaited:  # saving the evicted pages must not evict these from their tier
            self._tier(tiers, name).book.hold(name)
        if self._pool.free < len(names):
            self._prefix.evict(len(names) - self._pool.free)
        coming = min(len(names), self._pool.free)
        if self._prefix.snapshots is not None and coming == len(names):
            line = self._prefix.allocate_slot()
        if not coming or (self._prefix.snapshots is not None and line is None):
            for name in awaited:
                self._tier(tiers, name).book.release(name)
            self._prefix.leave(held, sequence.content, pages, len(pages))
            return False
        for name in names[coming:]:
            self._tier(tiers, name).book.release(name)
        names = names[:coming]
        taken = self._pool.allocate(coming, pages[-1] if pages else None)
        pages += taken
        arrival = Arrival(
            sequence, held, len(path), pages, names, tiers, line, self.clock(), len(names)
        )
        self._under_way[sequence] = arrival
        self.kept.used([*self.of(sequence).names[: len(path)], *names])
        for name, page in zip(names, taken, strict=True):
            self._tier(tiers, name).fetch(name, page)
        arrival.reading = {name: index for index, name in enumerate(names)}
        if line is not None:
            self._tier(tiers, awaited[-1]).fetch(awaited[-1], line, state=True)
            arrival.reading[awaited[-1]] = STATE
        self._by_name.update(dict.fromkeys(arrival.reading, arrival))
        return True

    def admitted(self, sequence: Sequence, computed: int) -> None:
        """Record which of a sequence's cached tokens were loaded. Called when it is admitted to a
        slot.
        """
        restore, account, size = self.of(sequence), sequence.account, self._pool.page_size
        if account.cached is None:
            cached = min(computed, sequence.prompt_length)
            account.restored = tuple(sorted(restore.tokens(cached, size).items()))
        for image, end in sequence.newly_cached(computed):
            tier = restore.tier(end - 1, size)
            sequence.found[image] = ImageOutcome(image, "kv", tier=tier)

    def left(self, sequence: Sequence) -> None:
        self.of(sequence).done = False

    # ---- steps

    @property
    def unsaved(self) -> bool:
        """Whether pages remain to be saved to the disk."""
        return self._prefix.unsaved or self.kept.moving

    def begin_plan(self, *, idle: bool) -> None:
        """End late loads. If `idle`, start saving pages that finished sequences have left."""
        self._look()
        if idle:
            self._prefix.save(IDLE_SAVE_BYTES)

    def take_moves(self) -> PageMoves:
        """Remove and return the plan's moves of pages between tiers."""
        return self.kept.take_moves()

    def applied(
        self, flight: InFlightPlan, result: StepResult, later: Iterable[InFlightPlan]
    ) -> None:
        """Process the result of a plan: the finished reads and writes, and the speed of the step.

        later: the plans in flight that were submitted after this one.
        """
        now = self.clock()
        rows = [row.length for row in flight.plan.rows if row.length > 1]
        self.rates.computed(sum(rows), now - max(flight.planned, self._applied))
        self._applied = now
        ahead = [moves for flight in later for moves in flight.plan.pages]
        unread = {(copy.name, tier) for tier, moves in ahead for copy in moves.fetch}
        self._hear(result.pages, unread)

    # ---- updates from the workers

    def _tier(self, tiers: Mapping[bytes, PageTier], name: bytes) -> CacheTierState:
        return self.kept.tiers[tiers[name]]

    def _hear(
        self, events: Iterable[PageEvent], unread: Collection[tuple[bytes, PageTier]]
    ) -> None:
        """Process the workers' reports of finished reads and writes.

        unread: pages whose reads have not started. A report about one of these is about an earlier
        read that was cancelled, so it is ignored.
        """
        for name, happened, tier in events:
            arrival = self._by_name.get(name)
            if happened == "not saved":
                self.kept.tiers[tier].not_saved(name)
            elif (name, tier) in unread:
                continue
            elif arrival is not None and arrival.tiers[name] == tier:
                del self._by_name[name]
                self._came(arrival, name, happened)
            elif happened != "read":
                self.kept.tiers[tier].lost(name, happened, held=False)

    def _came(self, arrival: Arrival, name: bytes, happened: Happened) -> None:
        index, place = arrival.reading.pop(name), arrival.tiers[name]
        tier = self.kept.tiers[place]
        if happened != "read":
            tier.lost(name, happened)
            self._cut(arrival, max(0, index))
        elif arrival.line is not None and index == STATE:
            tier.note_read(name, arrival.line, state=True)
        else:
            tier.note_read(name, arrival.pages[arrival.depth + index])
            arrival.came[place] += 1
        arrival.heard[place] = self.clock()
        if not arrival.reading:
            self._end(arrival)

    def _look(self) -> None:
        now = self.clock()
        for arrival in tuple(self._under_way.values()):
            waited, page_bytes = now - arrival.begun, self.kept.page_bytes
            if waited < self._grace(arrival):
                continue
            left = Counter(arrival.tiers[name] for name in arrival.reading)
            each = {tier: waited / (max(1, arrival.came[tier]) * page_bytes) for tier in left}
            measured = {
                tier: rate
                for tier, rate in each.items()
                if arrival.came[tier] or rate > self.rates.byte_seconds.get(tier, 0.0)
            }
            nbytes = {tier: count * page_bytes for tier, count in left.items()}
            pays = self.rates.pays(left.total() * self._pool.page_size, nbytes, measured)
            heard = max(arrival.heard.values(), default=arrival.begun)
            if not pays or now - heard > STALL_SECONDS:
                for tier, count in left.items():
                    self.kept.tiers[tier].counts["late"] += count
                    self.rates.record_read(
                        tier, page_bytes, each[tier] * page_bytes + FIRST_SECONDS
                    )
                self.end_wait(arrival.sequence)

    def _grace(self, arrival: Arrival) -> float:
        """Return the number of seconds after which a load is late. It is longest for the first
        page.
        """
        tokens = len(arrival.names) * self._pool.page_size
        return min(FIRST_SECONDS, (1 - NO_GAIN) * tokens * self.rates.token_seconds)

    def end_wait(self, sequence: Sequence) -> None:
        """End a sequence's wait. The pages that were loaded before the first missing one are
        cached.
        """
        if (arrival := self._under_way.get(sequence)) is not None:
            late = (i for i, name in enumerate(arrival.names) if name in arrival.reading)
            whole = next(late, arrival.whole)
            # no sequence can resume after the last page without its state
            if arrival.state in arrival.reading:
                whole = min(whole, len(arrival.names) - 1)
            self._cut(arrival, whole)
            self._end(arrival)

    def _cut(self, arrival: Arrival, index: int) -> None:
        """Stop loading an arrival's pages from `index` on, and release their pages in the pool."""
        names = arrival.names[index : arrival.whole]
        if arrival.state is not None and index < len(arrival.names):
            names.append(arrival.state)
        arrival.whole = min(arrival.whole, index)
        for name in names:
            reading = name in arrival.reading
            if reading:
                del arrival.reading[name]
                self._by_name.pop(name, None)
            tier = self._tier(arrival.tiers, name)
            if reading or name in tier.placing:
                tier.forget(name, reading=reading)

    def flush(self, disk: bool) -> None:
        """End all loads, and clear the prefix cache and its tiers. The disk is only cleared if
        `disk` is True.
        """
        for sequence in tuple(self._under_way):
            self.end_wait(sequence)
        self._prefix.flush()
        self.kept.flush(disk)

    def _end(self, arrival: Arrival) -> None:
        sequence, whole = arrival.sequence, arrival.depth + arrival.whole
        del self._under_way[sequence]
        for tier, count in arrival.came.items():
            seconds = arrival.heard[tier] - arrival.begun
            self.rates.record_read(tier, count * self.kept.page_bytes, seconds)
        names = arrival.names[: arrival.whole]
        node = self._prefix.leave(arrival.held, sequence.content, arrival.pages, whole, names=names)
        if arrival.line is not None:
            complete = arrival.whole == len(arrival.names)
            if not (
                complete and self._prefix.attach(node, sequence.content, node.depth, arrival.line)
            ):
                assert self._prefix.snapshots is not None
                self._prefix.snapshots.release(arrival.line)
        size = self._pool.page_size
        restore = self.of(sequence)
        restore.done, restore.start = True, arrival.depth * size
        sequence.account.slow_reads |= arrival.whole < len(arrival.names)
        restore.tiers = [arrival.tiers[name] for name in arrival.names[: arrival.whole]]
        sequence.matched = None

    def measure(self, metrics: Metrics, counts: Counts) -> None:
        """Update the metrics of the tiers."""
        for place, tier in self.kept.tiers.items():
            metrics.set("saccade_kv_tier_entries", len(tier.book), tier=place)
            metrics.set("saccade_kv_tier_bytes", tier.book.used_bytes, tier=place)
            metrics.set("saccade_kv_tier_budget_bytes", tier.book.budget_bytes, tier=place)
            metrics.set("saccade_kv_tier_evictions_total", tier.book.evictions, tier=place)
            tier.pinned.end_due()
            given_way = tier.pinned.book.given_way
            metrics.set("saccade_pinned", tier.pinned.nbytes, cache=f"kv {place}")
            metrics.set("saccade_pins_evicted_total", given_way, cache=f"kv {place}")
            metrics.set("saccade_restored_tokens_total", counts.restored_tokens[place], tier=place)
            for outcome in PAGE_OUTCOMES:
                count = tier.counts[outcome]
                metrics.set("saccade_kv_tier_pages_total", count, tier=place, outcome=outcome)
