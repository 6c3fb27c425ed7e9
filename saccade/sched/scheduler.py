"""The scheduler: the choice of the next work, and the use of results.

Owns every sequence, slot and page decision. Works with lengths, keys and token ids, not with
tensors, bytes or text. `image_scheduler.py` decides about images, `turns.py` about turns.

    add -> plan -> plan -> apply -> plan -> apply ...      (up to two plans in flight)

A plan names positions, not values: the next plan counts the tokens to be drawn by the plan in
flight. If such a token ends its answer, the next plan's row for the answer is computed and ignored.
Each step takes running sequences oldest first: one token for each decoding one, then prompts'
chunks within the token budget, of which each client has a share, then new sequences by turns. Older
sequences may take pages from the youngest (computed again later), so that the oldest always makes
progress. While a sequence lacks images, the others continue.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import Node, PrefixCache
from saccade.core.errors import InternalError, RequestError
from saccade.core.metrics import Metrics
from saccade.core.plan import (
    PLANS_IN_FLIGHT,
    FreeMemory,
    Masks,
    PageMoves,
    Plan,
    Row,
    StepResult,
)
from saccade.core.types import Delta, FinishReason, ImageKey, PooledOutput, Request, TokenLogprobs
from saccade.sched.answers import end_reason, follow, refusal, report
from saccade.sched.builder import InFlightPlan, PlanBuilder, PlannedOutcome
from saccade.sched.chunk import ImageChunks
from saccade.sched.images.image_scheduler import ImageScheduler
from saccade.sched.images.slots import Notices
from saccade.sched.kv_cache_manager import KVCacheManager
from saccade.sched.limits import NO_MEMORY_STEP, NOT_FINITE, Counts, SchedulerLimits, image_failure
from saccade.sched.parts.step_part import PartContext, Parts, StepPart
from saccade.sched.sequence import Run, Sequence
from saccade.sched.turns import IDLE_TOKENS, IdleWork, TurnQueue, find_crowding, in_turn

if TYPE_CHECKING:  # for what few servers have
    from saccade.sched.grammar_state import GrammarState
    from saccade.sched.images.tiles import TileIndex
    from saccade.sched.step_pace import StepPace

Part = TypeVar("Part", bound=StepPart)

BUNDLED_TOKENS = 16
"""Tokens that go to the front together where nobody reads along. The first goes alone."""


class GenerationScheduler:
    """The `protocol.Scheduler` that answers prompts.

    `apply` answers the oldest plan in flight. Anything else may be called at any time.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        prefix: PrefixCache | None,
        embeddings: EmbeddingCache,
        eos_token_ids: tuple[int, ...],
        pace: StepPace | None = None,
        tiles: TileIndex | None = None,
    ) -> None:
        """Build the parts that the limits and the caches ask for.

        pace: of steps with decoding rows, on an accelerator. tiles: as in `ImageScheduler`.
        """
        self.limits = limits
        # most tokens in one sequence, prompt and answer
        self.token_limit = min(limits.context_length, pool.capacity * pool.page_size)
        self.pool = pool
        self.embeddings = embeddings
        self.counts = Counts()
        self.image_scheduler = ImageScheduler(limits, embeddings, self.counts, pace, tiles)
        self._prompt_pace = None if pace is None else pace.prompts
        self.running: list[Sequence] = []  # by order
        self.waiting = TurnQueue()
        self.idle_work = IdleWork()
        context = PartContext(limits, pool, prefix, embeddings, self.token_limit)
        self._parts = Parts(context)
        # loads of pages from other tiers, or None without other tiers
        self.loads = self._parts.loads
        self._asking: dict[Sequence, tuple[StepPart, ...]] = {}  # of those that have more parts
        self._kv_cache = KVCacheManager(pool, prefix, self._parts, self.token_limit)
        self._chunks = ImageChunks(
            self.image_scheduler, embeddings, self._kv_cache, limits, self.counts
        )
        self._eos = frozenset(eos_token_ids)
        self._ids: dict[str, Sequence] = {}
        self._slots = list(range(limits.max_running))[::-1]  # free: workers close before they open
        self._closing: list[int] = []
        self._releases_memory = False
        self._flights: deque[InFlightPlan] = deque()  # planned, not yet applied; the oldest first

    # ---- requests and pixels arrive

    @property
    def prefix(self) -> PrefixCache | None:
        """The trie of computed pages, or None if off."""
        return self._kv_cache.prefix

    def part(self, kind: type[Part]) -> Part | None:
        """Return the part of a kind, or None on a scheduler without it."""
        return next((part for part in self._parts.built if isinstance(part, kind)), None)

    def _parts_of(self, sequence: Sequence) -> tuple[StepPart, ...]:
        return self._asking.get(sequence, self._parts.every)

    @property
    def idle(self) -> bool:
        """Return True if all requests have finished and the workers have released their slots."""
        held = self._closing or self._flights or self._releases_memory or self.image_scheduler.busy
        unsaved = self.loads is not None and self.loads.unsaved
        return not (self._ids or held or unsaved)

    def add_request(
        self, request: Request, grammar_state: GrammarState | None = None
    ) -> list[Delta]:
        """Queue a request under a new id. `grammar_state`: the state of its grammar, if any.

        An impossible request, or one whose answer can only be empty, gets its terminal delta at
        once.
        """
        assert request.id not in self._ids and bool(request.grammar) == (grammar_state is not None)
        fits = all(self.image_scheduler.slots.fits(image) for image in request.images)
        if (error := refusal(request, self.limits, self.token_limit, fits)) is not None:
            return [Delta(request.id, finish="error", error=error)]
        sequence = Sequence(
            request,
            self.counts.requests,
            grammar_state,
            chunk_aware=self.limits.chunk_aware,
        )
        self.counts.requests += 1
        if grammar_state is not None:
            try:
                reason = follow(sequence, grammar_state, None, self._eos, self.token_limit)
            except RequestError as fault:
                return [self._report(sequence, "error", fault.message, code=fault.code)]
            if reason is not None:
                return [self._report(sequence, reason)]
        self._ids[request.id] = sequence
        if request.caching.is_reported:
            self._asking[sequence] = self._parts.asking
        if sequence.idle:
            self.idle_work.later.append(sequence)
            return []
        if self.idle_work.active is not None:
            self._put_aside(self.idle_work.active)
        self._join(sequence)
        return []

    def _join(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)
        if sequence.images_end:
            self.image_scheduler.join(sequence)
            self._kv_cache.match(sequence)
            self.image_scheduler.ask_early(sequence)

    def _put_aside(self, sequence: Sequence) -> None:
        """Remove background work from the running sequences, as other work arrived."""
        if sequence.run is not None:
            self._preempt(sequence)
        else:
            self._leave_queue(sequence)
            sequence.matched = None
        self.image_scheduler.leave(sequence)
        self.idle_work.put_aside(sequence)

    def _leave_queue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence, served=False)
        if self.loads is not None:
            self.loads.end_wait(sequence)
        if self._kv_cache.refused is sequence:
            self._kv_cache.forget_refusal()

    def abort(self, id: str) -> list[Delta]:
        """End a request whose client has left. Returns an empty list if it has already ended."""
        return [self._finish(self._ids[id], "abort")] if id in self._ids else []

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error."""
        return [self._finish(sequence, "error", error) for sequence in list(self._ids.values())]

    def pixels_ready(
        self, key: ImageKey, pixels: bytes = b"", tiles: tuple[bytes, ...] = ()
    ) -> list[Delta]:
        """Take an image that the front has decoded into the slot named by `Notices.want`.

        pixels, tiles: as in `PixelsReady`.
        """
        self.image_scheduler.pixels_ready(key, pixels=pixels, tiles=tiles)
        return []

    def embedding_ready(self, key: ImageKey) -> list[Delta]:
        """Take an embedding given by another server. Otherwise like `pixels_ready`."""
        self.image_scheduler.pixels_ready(key, given=True)
        return []

    def pixels_failed(self, key: ImageKey, error: str) -> list[Delta]:
        """End every request that is stuck, as the front has given up writing to the slot."""
        needy = [
            sequence
            for sequence in self.image_scheduler.pixels_failed(key)
            if sequence.run is not None or sequence.last_use[key] > self._kv_cache.match(sequence)
        ]
        return [self._finish(sequence, "error", error) for sequence in needy]

    def flush(self, embeddings: bool, disk: bool = True) -> None:
        """Forget all pins, and all cached pages but those held by running sequences.

        With `embeddings`, also forgets unused embeddings and kept pixels. The disk is cleared only
        with `disk`. Waiting sequences compute their found prefixes again.
        """
        self._kv_cache.flush(disk)
        for part in self._parts.built:
            part.flush()
        if embeddings:
            self.image_scheduler.flush(disk)
        for sequence in self.waiting:
            sequence.matched = None

    def drop_pages(self, pages: int) -> int:
        """Evict up to `pages` unused, unpinned cached pages. Returns their number.

        Waiting sequences look for their prefixes again.
        """
        forgotten = self._kv_cache.forget(pages)
        for sequence in self.waiting if forgotten else ():
            sequence.matched = None
        return forgotten

    def release_memory(self) -> None:
        """Have the next plan release the memory of free pages, and of what else was freed."""
        self._releases_memory = True

    def measure(self, metrics: Metrics) -> None:
        """Copy what the parts count into the metrics that users see."""
        for part in self._parts.built:
            part.measure(metrics)
        if self.loads is not None:
            self.loads.measure(metrics, self.counts)
        for state, sequences in (("running", self.running), ("waiting", self.waiting)):
            names = (each.request.adapter.name for each in sequences if each.request.adapter.number)
            metrics.set_all("saccade_adapter_requests", Counter(names), state=state)

    def take_notices(self) -> Notices:
        """Return the news for the front, and clear it."""
        return self.image_scheduler.take_notices()

    # ---- plan

    def plan(self) -> Plan:
        """Return the next step. Legal while fewer than two are in flight.

        The plan must be applied unless `empty`. Then there is work only after a message arrives or
        a plan in flight is applied. Behind a plan of several steps none is made before its last.
        """
        assert len(self._flights) < PLANS_IN_FLIGHT, "too many plans in flight"
        if self._flights and self._flights[-1].left > 1:
            return Plan(self.counts.steps)
        if self.idle_work.later and not (self.running or len(self.waiting) or self._flights):
            self._join(self.idle_work.take_up())
        elif self.idle_work.active is not None and self._flights:
            return Plan(self.counts.steps)  # a new request waits for at most one step of it
        builder = self._draft()
        while builder.again and not (builder.works or self._closing):
            builder = self._draft()
        plan = self._build(builder)
        if not plan.empty:
            self.counts.steps += plan.steps
            self._flights.append(InFlightPlan(plan, builder.rows, builder.masked, plan.steps))
        return plan

    def take_cancel(self) -> bool:
        """Return True, once, if a plan of several steps should end now.

        New work has arrived, or a row is obsolete. Call this after every message and result.
        """
        flight = self._flights[-1] if self._flights else None
        if flight is None or flight.left == 1 or flight.halted:
            return False
        flight.halted = len(self.waiting) > 0
        for _, sequence, run in flight.rows:
            flight.halted |= sequence.run is not run
        return flight.halted

    def take_masks(self) -> tuple[Masks | None, list[Delta]]:
        """Return the masks of the oldest plan in flight, once, if any rows are masked.

        They are due before any later plan. Call this after every plan made or applied. Ends
        requests whose grammars have become too complex.
        """
        flight = self._flights[0] if self._flights else None
        if flight is None or not flight.unmasked:
            return None, []
        flight.unmasked = False
        deltas, words = [], []
        for row, sequence, run in flight.rows:
            if row.masked:
                try:
                    words.append(self._mask(row, sequence, run))
                except RequestError as error:
                    deltas.append(self._finish(sequence, "error", error.message, code=error.code))
                    words.append(self._mask(row, sequence, run))
        return Masks.of(flight.plan.step, words), deltas

    def _mask(self, row: Row, sequence: Sequence, run: Run) -> bytes:
        """Return the mask of a row. If the sequence has ended, what is drawn is ignored."""
        grammar_state = sequence.grammar_state
        assert grammar_state is not None
        if sequence.run is not run:
            return grammar_state.anything
        for part in self._parts_of(sequence):
            if (mask := part.mask(sequence, run, row)) is not None:
                return mask
        return grammar_state.mask()

    def _draft(self) -> PlanBuilder:
        tokens = self._count_prompt_tokens()
        builder = PlanBuilder(tokens, self._count_steps() if self.limits.plan_steps > 1 else 1)
        if self.loads is not None:
            self.loads.begin_plan(idle=not (self.running or len(self.waiting)))
        self.image_scheduler.begin_plan(builder)
        if len(self.waiting):
            self._preempt_beyond_share()
        builder.share = self._share(tokens)
        self._continue_running(builder)
        if len(self.waiting):
            self._admit_waiting(builder)
        self.image_scheduler.provide(
            chain(self.running, in_turn(self.waiting, self.running, self.limits.max_running)),
            self._kv_cache.match,
            builder,
        )
        self.image_scheduler.end_plan()
        return builder

    def _count_prompt_tokens(self) -> int:
        """Return how many tokens of prompts the next step has room for.

        The pace bounds them while anybody reads an answer as it comes.
        """
        decoding = [sequence for sequence in self.running if sequence.decoding]
        most = self.limits.chunk_tokens
        if self.idle_work.active is not None:
            most = min(most, IDLE_TOKENS)
        tokens = most - len(decoding)
        pace = self._prompt_pace
        if pace is not None and any(sequence.request.streamed for sequence in decoding):
            tokens = min(tokens, pace.tokens)
        # Rows that decode are beside a step's tokens in the workers' memory: an image always fits.
        return max(self.limits.whole_image_tokens, tokens)

    def _share(self, tokens: int) -> int:
        """Return how many of a step's tokens the prompts of one client may have.

        Clients with runnable prompts share them, and leave as much for waiting ones: a long
        prompt would keep others waiting until its end.
        """
        clients = {
            sequence.client
            for sequence in self.running
            if not sequence.decoding
            and self._chunks.chunk_limit(sequence, 1).end > sequence.position
        }
        others = self._slots and any(
            sequence.blocked is None and sequence.client not in clients for sequence in self.waiting
        )
        count = max(1, len(clients) + bool(others))
        return max(-(-tokens // count), self.limits.whole_image_tokens)

    def _count_steps(self) -> int:
        """Return how many steps the next plan may hold, and get the pages for these.

        It holds several where all that is left to do is to decode, and no grammar or part looks at
        each token before the next.
        """
        steps, size = self.limits.plan_steps, self.pool.page_size
        if len(self.waiting) or self.idle_work.active or self.image_scheduler.busy:
            return 1
        for sequence in self.running:
            if not sequence.decoding or sequence.grammar_state is not None:
                return 1
            steps = min(steps, sequence.remaining_tokens(self.token_limit) or steps)
            assert sequence.run is not None, "it runs"
            for part in self._parts_of(sequence):
                steps = part.limit_steps(sequence.run, steps)
        if steps == 1:
            return 1
        for sequence in self.running:
            run = sequence.run
            if run is None or not sequence.remaining_tokens(self.token_limit):
                continue  # plans in flight draw its last token
            missing = self.pool.pages_for(run.planned + steps) - len(run.pages)
            if missing > 0 and self._kv_cache.make_free(missing):
                run.pages += self.pool.allocate(missing, run.pages[-1])
            steps = min(steps, len(run.pages) * size - run.planned)
        return max(1, steps)

    def _build(self, builder: PlanBuilder) -> Plan:
        """Build the step.

        A plan that only continues an encoding, or waits, is made only when every other plan was
        applied. The result of a plan in flight may add more work.
        """
        pages: PageMoves = ()
        loading = False
        if self.loads is not None:
            pages, loading = self.loads.take_moves(), self.loads.busy
        works = builder.works or self._closing or pages or self._releases_memory
        beside = bool(builder.works or pages) and self.idle_work.active is None
        tower = (
            self.image_scheduler.tower(builder.decodes, beside) if works or not self._flights else 0
        )
        wait = not (works or tower or self._flights) and (
            loading or self.image_scheduler.waits_for_workers
        )
        closing, self._closing = self._closing, []
        unused = FreeMemory(self.pool.free_runs) if self._releases_memory else None
        self._releases_memory = False
        return builder.build(self.counts.steps, closing, tower, wait, pages, unused)

    def _preempt_beyond_share(self) -> None:
        """Preempt one sequence of a client or group beyond its share.

        This happens if the next in turn lacks a slot or pages, and its client or group is still
        without.
        """
        refused = self._kv_cache.refused
        if not self.running or (self._slots and refused is None):
            return
        turns = in_turn(self.waiting, self.running, self.limits.max_running)
        ready = (s for s in turns if s.blocked is None and not self.image_scheduler.lacks(s))
        newcomer = next(ready, None)
        if newcomer is None or (self._slots and refused is not newcomer):
            return
        rival = find_crowding(newcomer, self.waiting, self.running, self.limits.max_running)
        if rival is not None:
            self._preempt(rival)
            self.waiting.add(rival)

    def _continue_running(self, builder: PlanBuilder) -> None:
        """Plan running sequences, oldest first.

        The youngest, later in this loop, may lose their pages to older ones. The youngest of all,
        if unable to decode, steps back too: it would keep pages and token budget from an older
        sequence.
        """
        size, limit = self.pool.page_size, self.token_limit
        builder.width = len(self.running)
        for sequence in tuple(self.running):
            run = sequence.run
            if run is None or run.waits or not sequence.can_sample(limit):
                continue  # it lost its pages, or depends on tokens of the plans in flight
            if not sequence.decoding:
                self._prefill(sequence, run, builder)
            elif run.planned < len(run.pages) * size or (
                self._allocate(sequence, run, run.planned + 1) > run.planned
            ):
                self._decode(sequence, run, builder)
            elif not (run.drawing or self._pages_in_flight):
                self._preempt(sequence)
                self.waiting.put_back(sequence)

    def _decode(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:
        """Plan the newest token's row, and what parts have behind it."""
        parts, row = self._parts_of(sequence), None
        for part in parts:
            row = row or part.decode(sequence, run, builder, parts)
        row = row or builder.decode(sequence, run)
        for part in parts:
            part.planned(run, row, builder)

    def _admit_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting sequences by turns for slots and pages.

        Passes over sequences that wait only for images, or for an older sequence to compute the
        same prefix.
        """
        for sequence in in_turn(self.waiting, self.running, self.limits.max_running):
            if not self._slots or builder.tokens == 0:
                return
            blocked = sequence.blocked is not None and not self.image_scheduler.showable(
                sequence.blocked
            )
            if blocked and not sequence.cramped:
                continue
            if self._kv_cache.still_refused(sequence, self.running):
                return
            path = self._kv_cache.find_pages(sequence)
            if self.loads is not None and self._kv_cache.awaits(sequence, path, self.running):
                continue
            end, missing = self._chunks.chunk_limit(sequence, builder.room(sequence.client))
            length, early = end - sequence.position, self.limits.early_tokens
            short = length < early and not sequence.cramped
            sequence.blocked = missing if short or not length else None
            if not length or sequence.blocked is not None:
                continue
            if self._kv_cache.duplicate_prefix_ahead(sequence, self.running, early):
                continue
            if missing is not None and self._chunks.enough_lack(self.running):
                continue
            before = self._kv_cache.refused
            if not self._kv_cache.fits(sequence, path, self.running):
                builder.again |= before is not sequence
                return
            self._prefill(sequence, self._admit(sequence, path, builder), builder)

    def _admit(self, sequence: Sequence, path: list[Node], builder: PlanBuilder) -> Run:
        first, found = sequence.cached is None, len(sequence.found)
        pages, computed = [step.page for step in path], len(path) * self.pool.page_size
        node = self._kv_cache.hold_pages(sequence, path)
        run = sequence.admit(self._slots.pop(), node, pages, computed)
        self._kv_cache.forget_refusal()
        self.waiting.remove(sequence, served=True)
        insort(self.running, sequence, key=lambda s: s.order)
        builder.open(sequence, run)
        for part in self._parts_of(sequence):
            part.admitted(sequence, run, builder)
        if first:
            self.counts.prompt_tokens += sequence.prompt_length
            self.counts.cached_tokens += sequence.cached or 0
            self.counts.restored_tokens.update(dict(sequence.account.restored))
        self.counts.images_kv += len(sequence.found) - found
        for key, end in sequence.last_use.items():
            if first:
                self.embeddings.hit(key, sequence.client)
            if end <= computed:
                self.image_scheduler.settle(key)
        return run

    def _prefill(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:
        """Plan the next chunk, as far as the token budget, the images and the pages allow."""
        end = self._chunks.chunk_limit(sequence, builder.room(sequence.client)).end
        if end == run.planned:
            return
        parts = self._parts_of(sequence)
        for part in parts:
            end = part.cut(run, end)
        # The oldest sequence that can prefill, once it has no step in flight, may exceed the
        # device's budget by one image rather than wait, so that there is always progress.
        may_exceed = not builder.prefilling and run.planned == run.computed
        builder.prefilling = True
        end = self._chunks.whole(sequence, run.planned, self._allocate(sequence, run, end))
        end = self._chunks.show(sequence, run, end, builder, may_exceed)
        if end > run.planned:
            row = builder.prefill(sequence, run, end, self.limits.batch_invariant)
            for part in parts:
                part.planned(run, row, builder)

    # ---- pages

    @property
    def _pages_in_flight(self) -> int:
        """Count the pages that are free once the plans in flight have been applied."""
        return sum(len(flight.pages) for flight in self._flights)

    def _allocate(self, sequence: Sequence, run: Run, end: int) -> int:
        """Get pages up to token `end`, and return the end that they reach for now.

        Uses free pages first, then unused cached pages, then those of younger sequences.
        """
        missing = self.pool.pages_for(end) - len(run.pages)
        if missing > 0:
            while not self._kv_cache.make_free(missing) and self.running[-1] is not sequence:
                if self.pool.free + self._pages_in_flight >= missing:
                    break
                youngest = self.running[-1]
                self._preempt(youngest)
                self.waiting.put_back(youngest)
            after = run.pages[-1] if run.pages else None
            run.pages += self.pool.allocate(min(missing, self.pool.free), after)
        return min(end, len(run.pages) * self.pool.page_size)

    def _preempt(self, sequence: Sequence) -> None:
        """Stop a running sequence, which the caller puts back into the queue.

        Tokens sampled by plans in flight are sampled again later.
        """
        self._fail(sequence)
        self.running.remove(sequence)
        sequence.preempt()
        self.counts.preemptions += 1

    def _fail(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        """Take a running sequence's slot, pages and pins back.

        Its whole computed pages stay findable. The rest are free once every plan in flight is done
        writing to them.
        """
        run = sequence.run
        assert run is not None
        rest = self._kv_cache.leave(sequence, run)
        for part in self._parts_of(sequence):
            part.left(sequence, run, reason)
        writers = [
            flight for flight in self._flights if any(writer is run for _, _, writer in flight.rows)
        ]
        if writers:
            writers[-1].pages += rest
        else:
            self.pool.release(rest)
        for key in run.pins:
            self.embeddings.unpin(key)
        self._slots.append(run.slot)
        self._closing.append(run.slot)

    # ---- apply

    def apply(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest plan in flight.

        Ignores rows whose sequences have ended, or lost their slot, meanwhile. Workers execute
        plans in order.
        """
        flight = self._flights[0]
        ends = result.skipped or flight.left == 1
        assert flight.plan.step + flight.plan.steps - flight.left == result.step, "not in order"
        if ends:
            self._flights.popleft()
        if self.image_scheduler.pace is not None:
            self.image_scheduler.step_ended(flight.plan, flight.planned)
        deltas = self._take_images(result)
        if self.loads is not None:
            self.loads.applied(flight, result, self._flights)
        for key, event in result.disk:
            if event == "not saved":
                self.embeddings.not_saved(key)
            else:
                self.image_scheduler.read_ended(key, event == "read")
        if result.skipped:
            flight.take_back()
            for _, sequence, run in flight.rows:
                if sequence.run is run:
                    for part in self._parts_of(sequence):
                        part.skipped(run)
            self.counts.steps -= flight.left
        elif result.exhausted:
            kept = (sequence for _, sequence, run in flight.rows if sequence.run is run)
            deltas += [self._finish(sequence, "error", NO_MEMORY_STEP) for sequence in kept]
        else:
            outcomes: Iterable[PlannedOutcome] = flight.outcomes(result)
            for part in self._parts.every:
                outcomes = part.outcomes(flight, result, outcomes)
            for outcome in outcomes:
                if outcome.sequence.run is outcome.run:
                    deltas += self._take_outcome(outcome)
        if ends:
            self.pool.release(flight.pages)
        else:
            flight.advance()
        return deltas

    def _take_images(self, result: StepResult) -> list[Delta]:
        for key, _, _ in result.encoded:
            self.image_scheduler.encoded(key)
        return [
            self._finish(sequence, "error", error, code=code)
            for key, why in result.failed
            for error, code in [image_failure(why)]
            for sequence in self.image_scheduler.encode_failed(key)
        ]

    def _take_outcome(self, outcome: PlannedOutcome) -> list[Delta]:
        row, sequence, run, token, logprobs, scores, pooled_output, non_finite = outcome
        if non_finite:
            # Before its pages can be found: no other sequence uses them yet.
            return [self._finish(sequence, "error", NOT_FINITE, code=InternalError.code)]
        deltas, end = [], row.start + row.length
        known = end < len(sequence.tokens)  # what is drawn
        if row.sample and not known and run.drawing:
            run.drawing -= 1
        self._advance(sequence, run, end)
        if scores is not None:
            sequence.scored = scores.start + scores.count
            deltas.append(Delta(sequence.request.id, scores=scores))
        if token is not None and not known:
            deltas += self._append(sequence, token, logprobs)
        if pooled_output is not None:
            deltas.append(self._report_pooled_output(sequence, run, pooled_output))
        return deltas

    def _advance(self, sequence: Sequence, run: Run, end: int) -> None:
        """Publish full pages and release used images, as KV is valid up to `end`."""
        before = run.computed
        self._kv_cache.publish(sequence, run, end)
        for part in self._parts_of(sequence):
            part.computed(sequence, run, before)
        for key in [key for key in run.pins if not sequence.needs(key)] if run.pins else ():
            run.pins.remove(key)
            self.embeddings.unpin(key)
        if not self.limits.chunk_aware and before < sequence.images_end <= end:
            for key in sequence.last_use:  # some were encoded and never shown
                self.image_scheduler.settle(key)

    def _report_pooled_output(
        self, sequence: Sequence, run: Run, pooled_output: PooledOutput
    ) -> Delta:
        """Report a pooled output. A sequence without a draw ends with its prompt."""
        sequence.scored = run.computed
        if run.computed < sequence.prompt_length:
            return Delta(sequence.request.id, pooled_output=pooled_output)
        return replace(self._finish(sequence, "stop"), pooled_output=pooled_output)

    def _append(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> list[Delta]:
        """Add a token to an answer. Returns updates, batched for answers that are not streamed."""
        sequence.tokens.append(token)
        given = () if logprobs is None else (logprobs,)
        reason = end_reason(sequence, token, self._eos, self.token_limit)
        if (grammar_state := sequence.grammar_state) is not None:
            try:
                grammar_state.accept(token)
                reason = follow(sequence, grammar_state, reason, self._eos, self.token_limit)
            except RequestError as error:
                return [self._finish(sequence, "error", error.message, code=error.code)]
        if reason is not None:
            return [self._finish(sequence, reason, None, given)]
        request, told = sequence.request, sequence.reported
        waits = not request.streamed and request.sampling.logprobs is None
        if waits and told is not None and sequence.output_length - told < BUNDLED_TOKENS:
            return []
        return [self._report(sequence, None, None, given)]

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        code: str | None = None,
    ) -> Delta:
        """End a sequence and free its resources. The next plan closes its slot."""
        aside = sequence.idle and sequence is not self.idle_work.active
        if sequence.run is not None:
            self._fail(sequence, reason)
            self.running.remove(sequence)
        elif not aside:
            self._leave_queue(sequence)
        sequence.finish()
        del self._ids[sequence.request.id]
        self._asking.pop(sequence, None)
        if sequence.images_end and not aside:
            self.image_scheduler.leave(sequence)
        if sequence.idle:
            self.idle_work.remove(sequence)
        return self._report(sequence, reason, error, logprobs, code)

    def _report(
        self,
        sequence: Sequence,
        reason: FinishReason | None,
        error: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        code: str | None = None,
    ) -> Delta:
        self.counts.generated_tokens += len(sequence.unreported)
        return report(sequence, reason, error, logprobs, code)

    # ---- for tests

    def audit(self) -> None:
        """Assert that every page is accounted for: free, the trie's, a sequence's, or in flight."""
        runs = [s.run for s in self.running if s.run is not None]
        holders = [run.pages for run in runs] + [flight.pages for flight in self._flights]
        lines = [line for part in self._parts.built for line in part.audit(runs)]
        self._kv_cache.audit(holders, lines)
        self.image_scheduler.audit()
