"""A worker without tensors that checks every plan as it executes it, and the front end that answers
for pixels.

KV contents are digests of everything that decided them (salt, and every token or picture row up to
there), so that a wrong prefix hit, a page that is reused too early or a wrong splice is found at
the step where it happens. The next token is a function of that digest, so that answers can be
compared with `reference`, which knows no caches at all.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.pins import Clock
from saccade.cache.prefix import Node, PrefixCache
from saccade.cache.snapshots import Snapshots
from saccade.core.config import EmbeddingBudgets, embedding_file_bytes
from saccade.core.plan import (
    NO_LINE,
    PAGE_TIERS,
    TOWER_RESTS,
    DiskEvent,
    HeadDrafts,
    Move,
    Open,
    PageCopy,
    PageEvent,
    PixelSlot,
    Place,
    Plan,
    Row,
    ScoreRun,
    StepResult,
)
from saccade.core.types import (
    Delta,
    Image,
    ImageKey,
    PromptScores,
    Request,
    SamplingParams,
    Span,
    TokenLogprobs,
)
from saccade.plugins.drafts.drafter import Drafter, Speculation, StepCosts
from saccade.plugins.drafts.speculative import SpeculativeDecoding
from saccade.plugins.tiers.kept_pages import OffloadedPages
from saccade.sched.limits import SchedulerLimits
from saccade.sched.scheduler import GenerationScheduler
from saccade.sched.sequence import Sequence, State
from saccade.sched.step_pace import StepPace

VOCABULARY = 40
PLACEHOLDER = 39
EOS = 0


def picture(name: int, tokens: int, salt: str = "") -> Image:
    return Image(
        ImageKey(name.to_bytes(32, "big"), bytes(16), salt),
        (1, 2, 2 * tokens),
        tokens,
        4 * tokens,
        (32, 32 * tokens),
    )


def digest(before: bytes, item: object) -> bytes:
    return blake2b(before + repr(item).encode(), digest_size=16).digest()


def next_token(history: bytes) -> int:
    return int.from_bytes(history[:4], "big") % (VOCABULARY - 1)


def items(tokens: list[int], spans: tuple[Span, ...], images: tuple[Image, ...]) -> list[object]:
    """What each position really shows."""
    shown: list[object] = list(tokens)
    for span in spans:
        for i in range(span.length):
            shown[span.start + i] = (images[span.image].key, span.offset + i)
    return shown


def reference(request: Request, limit: int) -> tuple[list[int], str]:
    """The answer and its finish reason, computed from nothing but the request."""
    history = request.cache_salt.encode()
    for item in items(list(request.tokens), request.spans, request.images):
        history = digest(history, item)
    sampling, output = request.sampling, []
    while True:
        token = next_token(history)
        output.append(token)
        stops = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        if stops and len(output) > sampling.min_tokens:
            return output, "stop"
        if len(output) >= sampling.max_tokens or len(request.tokens) + len(output) >= limit:
            return output, "length"
        history = digest(history, token)


@dataclass
class Seat:
    """A worker's view of one slot."""

    tokens: list[int]
    open: Open
    request: Request
    pages: list[int]
    computed: int
    shown: list[object]
    history: list[bytes] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    fresh: bool = True

    def grow(self, token: int) -> None:
        self.tokens.append(token)
        self.shown.append(token)

    def go_back(self, start: int, token: int) -> None:
        """What was computed from there on was guessed."""
        assert len(self.open.tokens) <= start <= self.computed
        for kept in (self.tokens, self.shown, self.history):
            del kept[start:]
        self.grow(token)
        self.computed = start


@dataclass
class Shelf:
    """A worker's view of one tier of pages. files: pages and states by name. unwritten: gone, which
    the scheduler hears late. restored: how many were read.
    """

    files: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    unwritten: set[bytes] = field(default_factory=set)
    fetching: dict[bytes, PageCopy] = field(default_factory=dict)
    fetched: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    restored: int = 0


class Worker:
    """Executes plans; asserts that each is legal."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        requests: dict[int, Request],
        lines: range | None = None,
    ) -> None:
        self.lines = lines  # of snapshots, for a model that keeps a state per sequence
        self.between = limits.drafts.states or range(0)
        self.saved_between = 0  # snapshots of a state with guesses behind it
        self.states: dict[int, bytes] = {}  # by line: the digest of what the state has seen
        self.limits = limits
        self.pool = pool
        self.requests = requests  # by sampling.seed: `Open` does not name the request
        self.seats: dict[int, Seat] = {}
        self.kv: dict[int, bytes] = {}
        self.tiers: dict[Place, set[ImageKey]] = {
            "device": set(),
            "host": set(),
            "staged": set(),
            "disk": set(),
        }
        self.reading: list[ImageKey] = []
        self.rng = random.Random(0)
        self.unsaved: set[ImageKey] = set()  # could not be written, which the scheduler hears late
        self.harm = 0.0  # how likely a file is damaged, or cannot be written
        self.pixels: dict[int, tuple[PixelSlot, ImageKey]] = {}  # by offset: what was written
        self.encoding: dict[ImageKey, int] = {}  # patch-blocks left, in order
        self.encoded: Counter[ImageKey] = Counter()
        self.slots: dict[ImageKey, PixelSlot] = {}  # that the tower reads
        self.idle: set[ImageKey] = set()  # being encoded though nobody waited when that began
        self.kept = {place: Shelf() for place in PAGE_TIERS}
        self.named: dict[bytes, tuple[bytes, ...]] = {}  # what each name has ever stood for
        self.lag = 0.0  # how likely an encoding without a bound goes on in the next step

    def execute(self, plan: Plan) -> StepResult:
        if not plan.steps:
            assert all(map(self._decodes, plan.rows)), "only rows that decode may be skipped"
            without_rows = replace(plan, rows=(), snapshot=(), steps=1)
            return replace(self.execute(without_rows), skipped=True)
        for slot in plan.close:
            del self.seats[slot]
        for entry in plan.open:
            self._open(entry)
        self._move_pages(plan)
        for move in plan.moves:
            self._move(move)
        assert self.lines is not None or not (plan.restore or plan.snapshot)
        opened = {entry.slot for entry in plan.open if entry.pages}
        back = [copy for copy in plan.restore if copy.source in self.between]
        rest = [copy for copy in plan.restore if copy.source not in self.between]
        assert {copy.target for copy in rest} == (opened if self.lines else set())
        assert len({copy.target for copy in plan.restore}) == len(plan.restore)
        assert all(self.lines and copy.source in self.lines for copy in rest)
        assert {copy.target for copy in back} <= {row.slot for row in plan.rows} - opened
        found = [self.states[copy.source] for copy in plan.restore]
        self.states.update(zip([copy.target for copy in plan.restore], found))
        self._check_kept(plan)
        encoded = self._encode(plan)
        assert set(plan.save) <= self.tiers["device"] - self.tiers["disk"]
        self.tiers["disk"] |= set(plan.save)
        self.unsaved -= set(plan.save)
        self._check_budgets(plan)
        shown: dict[int, tuple[ImageKey, int]] = {}
        drawn: list[int] = []
        scores: list[tuple[int, PromptScores]] = []
        guesses: list[HeadDrafts] = []
        first = 0
        for place, row in enumerate(plan.rows):
            seat = self.seats[row.slot]
            seat.pages += row.pages
            self._forward(row, seat, first, shown)
            first += row.length
            for extra in row.extras:
                assert isinstance(extra, ScoreRun)
                assert row.start < extra.first < extra.end <= row.start + row.length + 1
                ids = array("i", seat.open.tokens[extra.first : extra.end]).tobytes()
                scores.append((place, PromptScores(extra.first, ids, ids, ids)))
            if row.head_drafts:
                guesses.append(self._guess(plan, row, seat.history[-1]))
            if row.sample:
                drawn.append(next_token(seat.history[-1]))
                seat.grow(drawn[-1])
        ended = {row.slot: row.start + row.length for row in plan.rows}
        ended |= {row.keep: row.start + row.length for row in plan.rows}
        targets = [copy.target for copy in plan.snapshot]
        assert len(set(targets)) == len(targets), "two states saved to one line"
        for copy in plan.snapshot:
            assert self.lines and copy.target in self.lines
            assert ended[copy.source] % self.pool.page_size == 0, "no page ends there"
            self.saved_between += copy.source in self.between
            self.states[copy.target] = self.states[copy.source]
        spliced = [
            (s.row + i, (s.key, s.offset + i)) for s in plan.splices for i in range(s.length)
        ]
        assert len(spliced) == len(shown) and dict(spliced) == shown, (
            "splices are not exactly the picture rows of the batch"
        )
        assert {key for key, _ in shown.values()} <= self.tiers["device"] - self.encoding.keys()
        for seat in self.seats.values():
            seat.fresh = False
        for first_page, count in plan.unused.pages if plan.unused else ():
            size = self.pool.page_size
            for place in range(first_page * size, (first_page + count) * size):
                self.kv.pop(place, None)
        logprobs = tuple((at, TokenLogprobs(token, -1.0)) for at, token in enumerate(drawn))
        return StepResult(
            plan.step,
            tuple(drawn),
            logprobs,
            tuple(scores),
            head_drafts=tuple(guesses),
            encoded=tuple((key, 1.0, 0.0) for key in encoded),
            disk=tuple(self._disk_events(plan)),
            pages=tuple(self._page_events(plan)),
        )

    def _guess(self, plan: Plan, row: Row, history: bytes) -> HeadDrafts:
        """A head's guesses behind the row or the last right draft after it, some of them wrong."""
        assert self.limits.drafts.head and row.sample and not row.draft
        place, token = row.start + row.length, next_token(history)
        for other in plan.rows:
            if other.draft and (other.slot, other.start) == (row.slot, place):
                if other.tokens[0] != token:
                    break
                history = digest(history, token)
                place, token = place + 1, next_token(history)
        found: list[int] = []
        for _ in range(row.head_drafts):
            history = digest(history, token)
            token = next_token(history)
            found.append((token + (place + len(found)) % 5 // 4) % VOCABULARY)
        return HeadDrafts(place + 1, tuple(found))

    def _move_pages(self, plan: Plan) -> None:
        """Pages as files: those of one name have one content, whoever wrote them. What comes from
        the host lies in its place before the scheduler hears of it.
        """
        for place, moves in plan.pages:
            tier = self.kept[place]
            for name in moves.drop:
                assert name in tier.files or name in tier.unwritten, "removed though not there"
                tier.files.pop(name, None)
            for copy in moves.save:
                assert copy.name not in tier.files, "saved twice"
                content = self._content(copy)
                assert self.named.setdefault(copy.name, content) == content, "a name has two"
                tier.files[copy.name] = content
            for name in moves.forget:
                known = name in tier.fetching or name in tier.fetched or name in tier.unwritten
                assert known, "nobody has read it"
                tier.fetching.pop(name, None)
                tier.fetched.pop(name, None)
        for place, moves in plan.pages:
            tier = self.kept[place]
            for copy in moves.fetch:
                assert copy.name not in tier.fetching, "read twice"
                tier.fetching[copy.name] = copy
                if place == "host":
                    self._put(copy, tier.files[copy.name])
            assert len({copy.place for copy in moves.place if not copy.state}) == sum(
                not copy.state for copy in moves.place
            ), "two pages come to one place"
            for copy in moves.place:
                content = tier.fetched.pop(copy.name)
                if place == "disk":
                    self._put(copy, content)
                else:
                    assert content == self._content(copy), "overwritten before it was placed"

    def _put(self, copy: PageCopy, content: tuple[bytes, ...]) -> None:
        if copy.state:
            (self.states[copy.place],) = content
        else:
            self.kv.update(enumerate(content, copy.place * self.pool.page_size))

    def _content(self, copy: PageCopy) -> tuple[bytes, ...]:
        if copy.state:
            return (self.states[copy.place],)
        start = copy.place * self.pool.page_size
        return tuple(self.kv[place] for place in range(start, start + self.pool.page_size))

    def _page_events(self, plan: Plan) -> Iterator[PageEvent]:
        """As of embeddings; the host's memory fails in nothing."""
        files, host = self.kept["disk"], self.kept["host"]
        for copy in (copy for tier, moves in plan.pages if tier == "disk" for copy in moves.save):
            if copy.name in files.files and self.rng.random() < self.harm:
                del files.files[copy.name]
                files.unwritten.add(copy.name)
                yield copy.name, "not saved", "disk"
        while host.fetching and (plan.wait or self.rng.random() < 0.7):
            name, copy = host.fetching.popitem()
            host.fetched[name] = self._content(copy)
            host.restored += 1
            yield name, "read", "host"
        while files.fetching and (plan.wait or self.rng.random() < 0.5):
            name = next(iter(files.fetching))
            del files.fetching[name]
            if name in files.files and self.rng.random() >= self.harm:
                files.fetched[name] = files.files[name]
                files.restored += 1
                yield name, "read", "disk"
            else:
                files.files.pop(name, None)
                files.unwritten.add(name)
                yield name, "damaged", "disk"

    def _move(self, move: Move) -> None:
        key, source = move.key, move.source
        assert key not in self.encoding, "moved before it is encoded"
        if move.target is None and key in self.unsaved - self.tiers[source] and source == "disk":
            return
        # a read that was planned before it was heard that the file could not be written: it fails
        unwritten = (source, move.target) == ("disk", "staged") and key in self.unsaved
        assert unwritten or key in self.tiers[source], "moved from where it is not"
        if (source, move.target) == ("disk", "staged"):
            assert key not in self.reading and key not in self.tiers["staged"], "read twice"
            self.reading.append(key)
            return
        assert (source, move.target) in {
            ("device", "host"),
            ("host", "device"),
            ("staged", "device"),
        } or move.target is None
        self.tiers[source].remove(key)
        if move.target is not None:
            assert key not in self.tiers[move.target]
            self.tiers[move.target].add(key)

    def _disk_events(self, plan: Plan) -> Iterator[DiskEvent]:
        """Reads end sooner or later; some files are damaged, some cannot be written."""
        for key in plan.save:
            if self.rng.random() < self.harm:
                self.tiers["disk"].remove(key)
                self.unsaved.add(key)
                yield key, "not saved"
        while self.reading and (plan.wait or self.rng.random() < 0.5):
            key = self.reading.pop(0)
            if key in self.tiers["disk"] and self.rng.random() >= self.harm:
                self.tiers["staged"].add(key)
                yield key, "read"
            else:
                self.tiers["disk"].discard(key)
                yield key, "not read"

    def _open(self, entry: Open) -> None:
        assert 0 <= entry.slot < self.limits.max_running and entry.slot not in self.seats
        computed = len(entry.pages) * self.pool.page_size
        assert computed < len(entry.tokens), "something must be left to compute"
        seat = Seat(
            list(entry.tokens),
            entry,
            self.requests[entry.sampling.seed],
            list(entry.pages),
            computed,
            items(list(entry.tokens), entry.spans, entry.images),
        )
        self.seats[entry.slot] = seat
        self._learn(seat, computed)

    def _encode(self, plan: Plan) -> list[ImageKey]:
        """Begin encodings and go on with those that have begun; returns those that have ended.

        Without a bound they end in this step or, as on a stream of their own, in a later one.
        """
        for encode in plan.encode:
            assert not any(
                encode.key in self.tiers[place] for place in ("device", "host", "staged")
            ), "encoded twice"
            self._check_pixels(encode.key, encode.pixels)
            self.tiers["device"].add(encode.key)
            self.encoded[encode.key] += 1
            self.encoding[encode.key] = encode.patches * self.limits.tower_blocks
            self.slots[encode.key] = encode.pixels
        patches = [encode.patches for encode in plan.encode]
        assert len(patches) <= 1 or sum(patches) <= self.limits.encode_patches
        waited = (
            self.reading or self.encoding or any(shelf.fetching for shelf in self.kept.values())
        )
        assert not plan.wait or waited, "waits for nothing"
        assert plan.tower or not (self.encoding and self.limits.tower_budget)
        works = plan.rows or plan.moves or plan.pages or plan.save
        assert plan.tower != TOWER_RESTS or works, "nothing goes on"
        self.idle |= {encode.key for encode in plan.encode if encode.idle}
        ended: list[ImageKey] = []
        budget = max(0, plan.tower) if plan.tower else sum(self.encoding.values())
        for key, work in sorted(self.encoding.items(), key=lambda item: item[0] in self.idle):
            if not plan.tower and not (plan.wait and not ended) and self.rng.random() < self.lag:
                break
            self.encoding[key] = max(0, work - budget)
            budget -= min(budget, work)
            if not self.encoding[key]:
                self._check_pixels(key, self.slots.pop(key))
                del self.encoding[key]
                self.idle.discard(key)
                ended.append(key)
        return ended

    def _check_pixels(self, key: ImageKey, slot: PixelSlot) -> None:
        assert self.pixels.get(slot.offset) == (slot, key), "the slot holds something else"

    def write(self, slot: PixelSlot, key: ImageKey) -> None:
        """The front end writes pixels."""
        for other in [other for other, _ in self.pixels.values()]:
            if (
                other.offset < slot.offset + slot.nbytes
                and slot.offset < other.offset + other.nbytes
            ):
                del self.pixels[other.offset]
        self.pixels[slot.offset] = slot, key

    def _check_budgets(self, plan: Plan) -> None:
        rows = [row for row in plan.rows if not row.draft]
        assert len({row.slot for row in rows}) == len(rows)
        assert len(plan.rows) - len(rows) < self.limits.max_running
        decodes = [self._decodes(row) for row in plan.rows]
        assert decodes == sorted(decodes, reverse=True), "decode rows must come first"
        prefills = [row for row in rows if not (self._decodes(row) or self._told(row))]
        tokens = sum(row.length for row in rows)
        singles = len(rows) - len(prefills)
        most = max(self.limits.chunk_tokens, singles + self.limits.whole_image_tokens)
        assert not prefills or tokens <= most

    def _check_kept(self, plan: Plan) -> None:
        """The state after a row is kept if a guess follows, in a line of its own."""
        kept = [row.keep for row in plan.rows if row.keep != NO_LINE]
        assert len(set(kept)) == len(kept) and {*kept} <= {*self.between}
        for slot in {row.slot for row in plan.rows}:
            *before, last = (row for row in plan.rows if row.slot == slot)
            assert last.keep == NO_LINE
            assert all((row.keep == NO_LINE) == (self.lines is None) for row in before)

    def _decodes(self, row: Row) -> bool:
        seat = self.seats[row.slot]
        return (
            not (seat.fresh or row.tokens)
            and row.length == 1
            and row.sample
            and row.start >= len(seat.open.tokens)
        )

    def _told(self, row: Row) -> bool:
        """One token after guesses, or a guess."""
        seat = self.seats[row.slot]
        return row.length == len(row.tokens) == 1 and row.start >= len(seat.open.tokens)

    def _learn(self, seat: Seat, end: int) -> None:
        """Extend the seat's expected history to `end` tokens."""
        while len(seat.history) < end:
            before = seat.history[-1] if seat.history else seat.request.cache_salt.encode()
            seat.history.append(digest(before, seat.shown[len(seat.history)]))

    def _forward(
        self, row: Row, seat: Seat, first: int, shown: dict[int, tuple[ImageKey, int]]
    ) -> None:
        size, end = self.pool.page_size, row.start + row.length
        if self._told(row):
            seat.go_back(row.start, row.tokens[0])
        assert (
            row.length > 0
            and row.start == seat.computed
            and end <= len(seat.tokens) <= self.limits.context_length
        )
        assert row.sample == (end == len(seat.tokens))
        if self.limits.whole_image_tokens:
            spans = seat.open.spans
            assert not any(each.start < end < each.end for each in spans), "half an image"
        most = seat.open.prompt_length + seat.open.sampling.max_tokens
        assert end + row.sample <= most, "a token is drawn beyond max_tokens"
        assert (
            end <= len(seat.pages) * size
            and 0 not in seat.pages
            and len(set(seat.pages)) == len(seat.pages)
        )
        self._learn(seat, end)
        if self.lines is not None:
            if row.start:
                went_on = self.states[row.slot] == seat.history[row.start - 1]
                assert went_on, "a row goes on from another state than its own"
            self.states[row.slot] = self.states[row.keep] = seat.history[end - 1]
        places = seat.places  # where in the KV cache each token lies; pages are only added
        places += [seat.pages[i // size] * size + i % size for i in range(len(places), end)]
        found = list(map(self.kv.get, places[: row.start]))
        assert found == seat.history[: row.start], (
            f"a token of {seat.request.id} attends to something else"
        )
        for i in range(row.start, end):
            self.kv[places[i]] = seat.history[i]
        for i in range(row.start, end):
            item = seat.shown[i]
            if isinstance(item, tuple):
                shown[first + i - row.start] = item
        seat.computed = end


class WatchedEmbeddings(EmbeddingCache):
    """Counts how often the budget was knowingly exceeded."""

    excesses = 0

    def admit(
        self,
        key: ImageKey,
        num_tokens: int,
        keep: Collection[ImageKey] = (),
        *,
        idle: bool = False,
    ) -> list[Move]:
        self.excesses += not self.fits(num_tokens)
        return super().admit(key, num_tokens, keep, idle=idle)

    def to_device(self, key: ImageKey, keep: Collection[ImageKey] = ()) -> list[Move]:
        self.excesses += not self.fits(self._known[key].num_tokens)
        return super().to_device(key, keep)


def guess_with(scheduler: GenerationScheduler, drafter: Drafter) -> None:
    """Have a scheduler that guesses do so by another drafter."""
    part = scheduler.part(SpeculativeDecoding)
    assert part is not None
    part.drafter = drafter


class Oracle(Drafter):
    """Guesses that are right, wrong, or right for a while: each token so likely as `accuracy`; or
    the worker's head's.
    """

    def __init__(self, simulation: Simulation, rng: random.Random, accuracy: float) -> None:
        super().__init__(6, head=simulation.scheduler.limits.drafts.head)
        self.costs = StepCosts(clock=lambda: 0.0)
        self._simulation = simulation
        self._rng = rng
        self._accuracy = accuracy

    def propose(
        self, sequence: Sequence, speculation: Speculation, room: int, rows: int
    ) -> list[int]:
        if self.head and self._rng.random() < 0.5:
            return super().propose(sequence, speculation, room, rows)
        if room <= 0 or not self.allows(sequence.request):
            return []
        speculation.source = "text"
        limit = self._simulation.scheduler.token_limit
        answer = reference(sequence.request, limit)[0]
        first = sequence.length - sequence.prompt_length
        right = answer[first : first + self._rng.randrange(min(room, self.most) + 1)]
        return [
            token if self._rng.random() < self._accuracy else self._rng.randrange(VOCABULARY)
            for token in right
        ]


class Simulation:
    """GenerationScheduler, worker and front in one process."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: int,
        page_size: int,
        prefix: bool = True,
        embedding_tokens: int = 10_000,
        host_tokens: int = 0,
        disk_tokens: int = 0,
        in_flight: int = 1,
        snapshots: int | None = None,
        kept_pages: int = 0,
        pace: StepPace | None = None,
        host_pages: int = 0,
        pinned_share: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """snapshots: for a model that keeps a state per sequence; None: one that keeps none.
        kept_pages, host_pages: for which there is room on disk, and in host memory. pinned_share:
        of these, by that clock.
        """
        self.in_flight = in_flight
        self.pool = PagePool(pages + 1, page_size)
        self.embeddings = WatchedEmbeddings(
            EmbeddingBudgets(embedding_tokens * 8, host_tokens * 8, disk_tokens * 8),
            8,
            file_bytes=int,
        )
        held: Snapshots[Node] | None = None
        lines = None
        if snapshots is not None:
            held = Snapshots(limits.max_running, snapshots)
            lines = range(limits.max_running, limits.max_running + snapshots)
        files = kept_pages * embedding_file_bytes(1)
        kept = OffloadedPages(b"model", 1, 1, files, (), host_pages, pinned_share, clock)
        tiers = kept if kept.tiers else None
        cache = PrefixCache(self.pool, snapshots=held, kept=tiers) if prefix else None
        self.scheduler = GenerationScheduler(
            limits, self.pool, cache, self.embeddings, (EOS,), pace
        )
        self.requests: dict[int, Request] = {}
        self.worker = Worker(limits, self.pool, self.requests, lines)
        self.deltas: dict[str, list[Delta]] = {}
        self.scored: defaultdict[str, list[int]] = defaultdict(list)
        self.alive: dict[str, Request] = {}
        self.wanted: dict[ImageKey, PixelSlot] = {}  # asked for by the engine, not yet answered
        self.unwanted: set[ImageKey] = set()  # of those
        self.asked: Counter[ImageKey] = Counter()
        self.flights: deque[tuple[Plan, dict[int, set[int]]]] = deque()
        self.tables: dict[int, list[int]] = {}  # pages by slot, as planned
        self.halts = 0  # asked for
        self.skipped = 0  # steps
        self._halting = -1  # the step behind the plan that is to end early

    def request(
        self,
        tokens: list[int],
        spans: tuple[Span, ...] = (),
        images: tuple[Image, ...] = (),
        salt: str = "",
        client: str = "",
        group: str = "",
        prompt_logprobs: int | None = None,
        **sampling: Any,
    ) -> Request:
        number = len(self.requests)
        params = SamplingParams(seed=number, **sampling)
        self.requests[number] = Request(
            f"r{number}",
            tuple(tokens),
            spans,
            images,
            params,
            salt,
            0.0,
            client,
            group,
            prompt_logprobs=prompt_logprobs,
        )
        return self.requests[number]

    def add(self, request: Request) -> str:
        self.deltas[request.id] = []
        self.alive[request.id] = request
        self.take(self.scheduler.add_request(request))
        self._notice()
        return request.id

    def abort(self, id: str) -> None:
        self.take(self.scheduler.abort(id))
        self._notice()

    def send_pixels(self, key: ImageKey) -> None:
        slot = self.wanted.pop(key)
        self.unwanted.discard(key)
        self.worker.write(slot, key)
        self.take(self.scheduler.pixels_ready(key))

    def flush(self, embeddings: bool) -> None:
        self.scheduler.flush(embeddings)
        self._notice()

    def release_memory(self, nbytes: int, pages: int) -> None:
        images = self.scheduler.image_scheduler
        images.slots.drop_kept(nbytes)
        images.drop_embeddings(nbytes)
        self.scheduler.drop_pages(pages)
        self.scheduler.release_memory()
        self._notice()

    def fail_pixels(self, key: ImageKey) -> None:
        del self.wanted[key]
        before = len(self.alive)
        self.take(self.scheduler.pixels_failed(key, "cannot be decoded"))
        assert key not in self.unwanted or len(self.alive) == before, "it was called off"
        self.unwanted.discard(key)

    def plan(self) -> Plan:
        self.embeddings.excesses = 0
        plan = self.scheduler.plan()
        if plan.empty:
            assert self.scheduler.plan().empty, "an empty plan, though there was something to do"
        assert self.embeddings.excesses <= 1, "only one image a step may exceed the budget"
        assert {encode.key for encode in plan.encode} <= self._needed(), "encoded for nobody"
        if not plan.empty:
            self._follow(plan)
        self._notice()
        self.check()
        for shelf in self.embeddings.tiers.values():
            if plan.encode and shelf.used_bytes > shelf.budget_bytes:
                assert len(shelf) == len({*shelf.held, *plan.save}), (
                    "over the budget, though something could have been evicted"
                )
        return plan

    def _follow(self, plan: Plan) -> None:
        """Assert that no page is handed out while a plan in flight writes to it for another."""
        for slot in plan.close:
            self.tables.pop(slot)
        self.tables |= {entry.slot: list(entry.pages) for entry in plan.open}
        opened = {entry.slot for entry in plan.open}
        for row in plan.rows:
            for _, written in self.flights:
                others = {s: pages for s, pages in written.items() if s != row.slot or s in opened}
                taken = {page for pages in others.values() for page in pages} & set(row.pages)
                assert not taken, "a page was handed out that a plan in flight writes to"
            self.tables[row.slot] += row.pages
        self.flights.append((plan, self._written(plan)))

    def _written(self, plan: Plan) -> dict[int, set[int]]:
        """The pages by slot that a plan's steps write to."""
        size, writes = self.pool.page_size, dict[int, set[int]]()
        for row in plan.rows:
            end = row.start + row.length + plan.steps - 1
            pages = self.tables[row.slot][row.start // size : -(-end // size)]
            writes.setdefault(row.slot, set()).update(pages)
        return writes

    def finish(self, plan: Plan) -> None:
        """Execute and apply a plan, which must be the oldest in flight, or its first step."""
        if not plan.empty:
            assert self.flights[0][0] is plan
            self._halt()
            plan, _ = self.flights.popleft()
            if plan.steps > 1:
                self.flights.appendleft((plan.rest, self._written(plan.rest)))
            self.take(self.scheduler.apply(self.worker.execute(plan)))
        self._notice()
        self.check()

    def _halt(self) -> None:
        """Have the worker see a halt, sooner or later."""
        plan, writes = self.flights[-1]
        halted = plan.step + plan.steps == self._halting
        if halted and plan.steps > 1 and self.worker.rng.random() < 0.5:
            self.flights[-1] = replace(plan, steps=0), writes
            self.skipped += plan.steps
            self._halting = -1  # the numbers of skipped steps are given again
            for row in plan.rows:
                del self.tables[row.slot][len(self.tables[row.slot]) - len(row.pages) :]

    def run(self, steps: int = 10_000) -> None:
        """Until everything has ended, answering for pixels at once."""
        for _ in range(steps):
            while len(self.flights) < self.in_flight and not self.plan().empty:
                pass
            worked = bool(self.flights)
            if self.flights:
                self.finish(self.flights[0][0])
            wanted = list(self.wanted)
            for key in wanted:
                if key in self.unwanted:
                    self.fail_pixels(key)
                else:
                    self.send_pixels(key)
            if not (worked or wanted):
                break
        assert not self.alive, "nothing to do, but requests are alive"
        assert self.scheduler.idle

    def output(self, id: str) -> list[int]:
        return [token for delta in self.deltas[id] for token in delta.tokens]

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.id in self.alive, "news after the end"
            if delta.scores:
                assert delta.scores.start == 1 + len(self.scored[delta.id]), "once, and in order"
                self.scored[delta.id] += array("i", delta.scores.ids)
                assert delta == Delta(delta.id, scores=delta.scores)
                continue
            assert (delta.error is not None) == (delta.finish == "error")
            assert delta.tokens or delta.finish
            if self.deltas[delta.id]:
                assert delta.cached_tokens == 0 and delta.images == ()
            self.deltas[delta.id].append(delta)
            if delta.finish:
                self._check_answer(self.alive.pop(delta.id))

    def _check_answer(self, request: Request) -> None:
        finish = self.deltas[request.id][-1].finish
        if len(request.tokens) >= self.scheduler.token_limit:
            assert finish == "error" and not self.output(request.id)
            return
        output, reason = reference(request, self.scheduler.token_limit)
        got = self.output(request.id)
        assert got == output[: len(got)], "an answer depends on a cache"
        first = self.deltas[request.id][0]
        assert first.cached_tokens < len(request.tokens)
        ends = {span.image: span.end for span in request.spans}
        for outcome in first.images:
            cached = ends[outcome.image] <= first.cached_tokens
            again = self.scheduler.counts.preemptions > 0  # then others may have computed it
            assert (outcome.level == "kv") == cached or (outcome.level == "kv" and again)
        if finish in ("stop", "length"):
            assert finish == reason and len(got) == len(output)
            wanted = () if request.prompt_logprobs is None else request.tokens[1:]
            assert tuple(self.scored[request.id]) == wanted
            assert {outcome.image for outcome in first.images} == ends.keys()

    def _notice(self) -> None:
        if self.scheduler.take_cancel():
            end = self.flights[-1][0].step + self.flights[-1][0].steps
            assert self._halting != end, "told twice"
            self._halting, self.halts = end, self.halts + 1
        notices = self.scheduler.take_notices()
        needed = self._needed()
        for key, slot in notices.want:
            assert key not in self.wanted and key in needed, "asked for twice, or for nobody"
            self.wanted[key] = slot
            self.asked[key] += 1
        for key in notices.unwanted:
            assert key in self.wanted and key not in self.unwanted
            self.unwanted.add(key)
        reading = [self.worker.slots[key] for key in self.worker.encoding]
        ends = 0
        for slot in sorted((*self.wanted.values(), *reading), key=lambda slot: slot.offset):
            assert slot.offset >= ends, "a slot is handed out that is written or read"
            ends = slot.offset + slot.nbytes
        assert ends <= self.scheduler.image_scheduler.slots.size

    def _needed(self) -> set[ImageKey]:
        sequences = (*self.scheduler.running, *self.scheduler.waiting)
        return {key for sequence in sequences for key in sequence.last_use if sequence.needs(key)}

    def check(self) -> None:
        """The invariants of the house plan that can be seen between any two events."""
        scheduler, embeddings = self.scheduler, self.embeddings
        scheduler.audit()
        known = (*scheduler.running, *scheduler.waiting, *scheduler.idle_work.later)
        assert {s.request.id for s in known} == self.alive.keys()
        if scheduler.idle_work.active is not None:
            assert len(scheduler.running) + len(scheduler.waiting) == 1, "beside who waits"
        assert [s.order for s in scheduler.running] == sorted(s.order for s in scheduler.running)
        assert len(scheduler.waiting) == len(tuple(scheduler.waiting))
        pins: set[ImageKey] = set()
        for s in scheduler.running:
            assert s.state is State.RUNNING and s.run is not None
            assert 0 <= s.run.computed <= s.run.planned <= s.length
            guessed = sum(
                row.draft and row.slot == s.run.slot
                for plan, _ in self.flights
                for row in plan.rows
            )
            assert s.run.computed <= len(s.tokens)
            most = len(self.flights) * scheduler.limits.plan_steps
            assert s.run.drawing <= most + guessed
            assert all(s.needs(key) for key in s.run.pins), "a pin outlives the last span"
            pins |= s.run.pins
        assert all(s.state is State.WAITING and s.run is None for s in scheduler.waiting)
        assert pins <= embeddings.device.held
        if scheduler.prefix:
            assert scheduler.prefix.evictable == sum(
                self.pool.refs[page] == 1 for page in scheduler.prefix.owned()
            )
            assert scheduler.prefix.pages == len(list(scheduler.prefix.owned()))

    def check_end(self) -> None:
        """Nothing is left over."""
        assert self.scheduler.idle and not self.alive and not self.worker.seats
        assert self.scheduler.image_scheduler.slots.bytes_in_use == 0, "a slot was never given back"
        assert all(
            sum(delta.finish is not None for delta in deltas) == 1
            for deltas in self.deltas.values()
        )
        self._check_counts()
        assert not self.embeddings.device.held and not self.worker.reading
        assert not self.worker.encoding
        for place, keys in self.worker.tiers.items():
            assert (
                all(key in self.embeddings.tiers[place] for key in keys)
                if place != "staged"
                else not keys
            )
            assert place == "staged" or len(keys) == len(self.embeddings.tiers.get(place, ()))
        cached = self.scheduler.prefix.pages if self.scheduler.prefix else 0
        assert self.pool.free + cached == self.pool.capacity
        if self.scheduler.prefix:
            assert self.scheduler.prefix.evict(cached) == cached
            if self.scheduler.prefix.snapshots:
                self.scheduler.prefix.snapshots.audit([])
        self.pool.audit([])

    def _check_counts(self) -> None:
        counts = self.scheduler.counts
        first = [deltas[0] for deltas in self.deltas.values()]
        levels = Counter(
            "none" if outcome.level == "pixels" else outcome.level
            for delta in first
            for outcome in delta.images
        )
        assert counts.cached_tokens == sum(delta.cached_tokens for delta in first)
        assert (counts.images_kv, counts.images_embedding) == (levels["kv"], levels["embedding"])
        assert counts.images_encoded == self.worker.encoded.total() >= levels["none"]
        lookups = [
            self.embeddings.hits[tier] + self.embeddings.misses[tier]
            for tier in self.embeddings.tiers
        ]
        assert (
            lookups[0] >= levels["none"] + levels["embedding"]
            and lookups[1:] == [self.embeddings.misses[t] for t in self.embeddings.tiers][:-1]
        )
        assert counts.generated_tokens == sum(len(self.output(id)) for id in self.deltas)


def random_request(simulation: Simulation, rng: random.Random, longest: int, names: int) -> Request:
    """Text, pictures (some in two parts, some repeated) and stray placeholder tokens, after one of
    a few shared beginnings.
    """
    salt = rng.choice(["", "", "", "other"])
    script = random.Random(rng.randrange(4))  # the shared beginning
    tokens: list[int] = []
    spans: list[Span] = []
    images: list[Image] = []
    shared, parts = rng.randrange(4), rng.randrange(1, 7)
    for part in range(shared + parts):
        source = script if part < shared else rng
        if source.random() < 0.5 or names == 0:
            tokens += [
                source.choice([1, 2, 3, PLACEHOLDER]) for _ in range(source.randrange(1, 20))
            ]
            continue
        name = source.randrange(names)
        image = picture(name, 1 + name * 7 % 30, salt)
        images.append(image)
        cut = source.randrange(image.num_tokens) if source.random() < 0.3 else 0
        for offset, length in ((0, cut), (cut, image.num_tokens - cut)):
            if length:
                spans.append(Span(len(tokens), length, len(images) - 1, offset))
                tokens += [PLACEHOLDER] * length + [4] * source.randrange(2)
    tokens, spans = tokens[:longest] or [1], [span for span in spans if span.end <= longest]
    used = sorted({span.image for span in spans})
    renumbered = tuple(Span(s.start, s.length, used.index(s.image), s.offset) for s in spans)
    return simulation.request(
        tokens,
        renumbered,
        tuple(images[i] for i in used),
        salt,
        rng.choice(["", "a", "b"]),
        rng.choice(["", "g", "h"]),
        max_tokens=rng.choice([1, 5, 30, 80]),
        min_tokens=rng.choice([0, 0, 3]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 2]))),
        logprobs=rng.choice([None, 0]),
        prompt_logprobs=rng.choice([None, None, 2]),
    )
