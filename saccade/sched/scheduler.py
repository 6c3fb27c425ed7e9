"""Decides what each step computes, and processes its results.

The scheduler allocates slots and pages to sequences. It works with lengths, keys and token ids,
never with tensors, bytes or text. `image_scheduler.py` schedules images, and `turns.py` orders
waiting sequences.

    add -> plan -> plan -> apply -> plan -> apply ...      (up to two plans in flight)

A plan refers to tokens by position. So the next plan can be made before the values of the tokens
that the plan in flight samples are known. If such a token ends the output, the next plan's row for
the sequence is wasted, and its result is ignored.

Each step takes running sequences, the oldest first: one token for each decoding sequence, then
chunks of prompts within a token budget that clients share. New sequences follow in the order of
their turns. An older sequence may preempt the youngest ones to get their pages, so that the oldest
always makes progress. Sequences that wait for images do not delay the others.
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

if TYPE_CHECKING:  # not imported unless a server needs them
    from saccade.sched.grammar_state import GrammarState
    from saccade.sched.images.tiles import TileIndex
    from saccade.sched.step_pace import StepPace

Part = TypeVar("Part", bound=StepPart)

BUNDLED_TOKENS = 16
"""Number of tokens per delta for requests that are not streamed. The first token is reported
immediately.
"""


class GenerationScheduler:
    """Schedules requests that generate text. Implements `protocol.Scheduler`.

    `apply` takes the result of the oldest plan in flight. All other methods may be called at any
    time.
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
        """Create the scheduler and the parts that the limits and the caches need.

        pace: limits the work on images and prompts in steps that decode. None on a CPU.
        tiles: as in `ImageScheduler`.
        """
        self.limits = limits
        # maximum tokens in one sequence, prompt and generated tokens
        self.token_limit = min(limits.context_length, pool.capacity * pool.page_size)
        self.pool = pool
        self.embeddings = embeddings
        self.counts = Counts()
        self.image_scheduler = ImageScheduler(limits, embeddings, self.counts, pace, tiles)
        self._prompt_pace = None if pace is None else pace.prompts
        self.running: list[Sequence] = []  # in order of arrival
        self.waiting = TurnQueue()
        self.idle_work = IdleWork()
        context = PartContext(limits, pool, prefix, embeddings, self.token_limit)
        self._parts = Parts(context)
        self.loads = self._parts.loads  # loads of pages from other tiers, or None without these
        # parts of the sequences with cache options; all others have `_parts.every`
        self._parts_by_sequence: dict[Sequence, tuple[StepPart, ...]] = {}
        self._kv_cache = KVCacheManager(pool, prefix, self._parts, self.token_limit)
        self._chunks = ImageChunks(
            self.image_scheduler, embeddings, self._kv_cache, limits, self.counts
        )
        self._eos = frozenset(eos_token_ids)
        self._ids: dict[str, Sequence] = {}
        # Free slots. A slot may be in `_closing` too, because a plan closes slots before it opens
        # any.
        self._slots = list(range(limits.max_running))[::-1]
        self._closing: list[int] = []
        self._releases_memory = False
        self._flights: deque[InFlightPlan] = deque()  # planned, not yet applied; the oldest first

    # ---- requests and pixels

    @property
    def prefix(self) -> PrefixCache | None:
        """The prefix cache, or None if it is disabled."""
        return self._kv_cache.prefix

    def part(self, kind: type[Part]) -> Part | None:
        """Return the scheduler's part of the class `kind`, or None if it has none."""
        return next((part for part in self._parts.built if isinstance(part, kind)), None)

    def _parts_of(self, sequence: Sequence) -> tuple[StepPart, ...]:
        return self._parts_by_sequence.get(sequence, self._parts.every)

    @property
    def idle(self) -> bool:
        """Return True if all requests have finished and the workers have released their slots."""
        held = self._closing or self._flights or self._releases_memory or self.image_scheduler.busy
        unsaved = self.loads is not None and self.loads.unsaved
        return not (self._ids or held or unsaved)

    def add_request(
        self, request: Request, grammar_state: GrammarState | None = None
    ) -> list[Delta]:
        """Queue a request, whose id must be new.

        A request that can never run, or whose output must be empty, gets its final delta at once.

        grammar_state: required if the request has a grammar, otherwise None.
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
            self._parts_by_sequence[sequence] = self._parts.asking
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
        """Preempt or dequeue the active background request because another request has arrived."""
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
        """Cancel a request whose client has disconnected, and return its final delta.

        Returns an empty list if the request has already ended.
        """
        return [self._finish(self._ids[id], "abort")] if id in self._ids else []

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error, and return the final deltas."""
        return [self._finish(sequence, "error", error) for sequence in list(self._ids.values())]

    def pixels_ready(
        self, key: ImageKey, pixels: bytes = b"", tiles: tuple[bytes, ...] = ()
    ) -> list[Delta]:
        """Record that the front end has decoded an image into the slot from `Notices.want`.

        pixels, tiles: as in `PixelsReady`.
        """
        self.image_scheduler.pixels_ready(key, pixels=pixels, tiles=tiles)
        return []

    def embedding_ready(self, key: ImageKey) -> list[Delta]:
        """Record that the image's slot contains an embedding computed by another server."""
        self.image_scheduler.pixels_ready(key, given=True)
        return []

    def pixels_failed(self, key: ImageKey, error: str) -> list[Delta]:
        """End every request that needs this image, which the front end could not decode."""
        needy = [
            sequence
            for sequence in self.image_scheduler.pixels_failed(key)
            if sequence.run is not None or sequence.last_use[key] > self._kv_cache.match(sequence)
        ]
        return [self._finish(sequence, "error", error) for sequence in needy]

    def flush(self, embeddings: bool, disk: bool = True) -> None:
        """Remove all pins, and all cached pages that running sequences do not use.

        The prompts of waiting sequences will be computed again, even if they were cached.

        embeddings: True to also remove embeddings and cached pixels that are not in use.
        disk: True to also clear the disk.
        """
        self._kv_cache.flush(disk)
        for part in self._parts.built:
            part.flush()
        if embeddings:
            self.image_scheduler.flush(disk)
        for sequence in self.waiting:
            sequence.matched = None

    def drop_pages(self, pages: int) -> int:
        """Evict up to `pages` cached pages that are neither in use nor pinned. Return how many were
        evicted.

        Waiting sequences are looked up in the prefix cache again.
        """
        forgotten = self._kv_cache.forget(pages)
        for sequence in self.waiting if forgotten else ():
            sequence.matched = None
        return forgotten

    def release_memory(self) -> None:
        """Let the next plan return unused memory, including that of free pages, to the operating
        system.
        """
        self._releases_memory = True

    def measure(self, metrics: Metrics) -> None:
        """Copy the counters and gauges of all parts to `metrics`."""
        for part in self._parts.built:
            part.measure(metrics)
        if self.loads is not None:
            self.loads.measure(metrics, self.counts)
        for state, sequences in (("running", self.running), ("waiting", self.waiting)):
            names = (each.request.adapter.name for each in sequences if each.request.adapter.number)
            metrics.set_all("saccade_adapter_requests", Counter(names), state=state)

    def take_notices(self) -> Notices:
        """Return the updates for the front end since the last call, and clear them."""
        return self.image_scheduler.take_notices()

    # ---- plan

    def plan(self) -> Plan:
        """Return the next step. Must not be called while `PLANS_IN_FLIGHT` plans are in flight.

        A plan must be executed and applied unless it is `empty`. After an empty plan, call this
        again once a message has arrived or a plan in flight has been applied. While a plan of
        several steps is in flight, the next one is made only when its last step is computed.
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
        """Return True, once, if the plan of several steps in flight should be cancelled.

        This is the case if a new request is waiting, if a sequence in the plan has ended, or if a
        part would now plan its steps differently. Call this after every message and result.
        """
        flight = self._flights[-1] if self._flights else None
        if flight is None or flight.left == 1 or flight.halted:
            return False
        flight.halted = flight.outdated or len(self.waiting) > 0
        for _, sequence, run in flight.rows:
            flight.halted |= sequence.run is not run
        return flight.halted

    def take_masks(self) -> tuple[Masks | None, list[Delta]]:
        """Return the masks for the oldest plan in flight, or None, and the deltas of failed
        requests.

        Requests whose grammars have become too complex end here. The masks of a plan are returned
        once. Send them before any later plan. Call this after every call of `plan` and `apply`.
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
        """Return the mask of a row. If the sequence has ended, all tokens are allowed because the
        result is ignored.
        """
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
        """Return the maximum number of prompt tokens in the next step.

        `PromptPace` reduces it while a streamed request decodes.
        """
        decoding = [sequence for sequence in self.running if sequence.decoding]
        most = self.limits.chunk_tokens
        if self.idle_work.active is not None:
            most = min(most, IDLE_TOKENS)
        tokens = most - len(decoding)
        pace = self._prompt_pace
        if pace is not None and any(sequence.request.streamed for sequence in decoding):
            tokens = min(tokens, pace.tokens)
        # The workers' memory has space for all decode rows in addition to `chunk_tokens`, so an
        # image that must not be split always fits.
        return max(self.limits.whole_image_tokens, tokens)

    def _share(self, tokens: int) -> int:
        """Return how many of a step's `tokens` prompt tokens each client may use.

        They are divided among the clients whose prompts can run, with one share for all waiting
        clients. Otherwise a long prompt would delay all others until its end.
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
        """Return the number of steps in the next plan, and allocate the pages that they need.

        A plan has several steps only if all sequences decode, there is no other work, and no
        grammar or part needs a token's value before the next step.
        """
        steps, rows, size = self.limits.plan_steps, len(self.running), self.pool.page_size
        if len(self.waiting) or self.idle_work.active or self.image_scheduler.busy:
            return 1
        for sequence in self.running:
            if not sequence.decoding or sequence.grammar_state is not None:
                return 1
            steps = min(steps, sequence.remaining_tokens(self.token_limit) or steps)
            assert sequence.run is not None, "it runs"
            for part in self._parts_of(sequence):
                steps = part.limit_steps(sequence, sequence.run, rows, steps)
        if steps == 1:
            return 1
        for sequence in self.running:
            run = sequence.run
            if run is None or not sequence.remaining_tokens(self.token_limit):
                continue  # plans in flight sample its last token
            missing = self.pool.pages_for(run.planned + steps) - len(run.pages)
            if missing > 0 and self._kv_cache.make_free(missing):
                run.pages += self.pool.allocate(missing, run.pages[-1])
            steps = min(steps, len(run.pages) * size - run.planned)
        return max(1, steps)

    def _build(self, builder: PlanBuilder) -> Plan:
        """Build the plan.

        While another plan is in flight, a plan that only continues an encoding, or only waits, is
        empty. The result of the plan in flight may allow more work.
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
        """Preempt a sequence of a client or group that exceeds its share.

        This happens if the next sequence to admit lacks a slot or pages, and its client or group
        has no slot yet.
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
        """Plan the running sequences, the oldest first.

        Older sequences may preempt the youngest ones, which come later in this loop. If the
        youngest sequence itself cannot get a page to decode, it is preempted as well. Otherwise it
        would keep pages that an older sequence needs.
        """
        size, limit = self.pool.page_size, self.token_limit
        builder.width = len(self.running)
        for sequence in tuple(self.running):
            run = sequence.run
            if run is None or run.waits or not sequence.can_sample(limit):
                continue  # it was preempted, or depends on the results of plans in flight
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
        parts, row = self._parts_of(sequence), None
        for part in parts:
            row = row or part.decode(sequence, run, builder, parts)
        row = row or builder.decode(sequence, run)
        for part in parts:
            part.planned(run, row, builder)

    def _admit_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting sequences in the order of their turns, while there are slots and pages.

        Skips sequences that wait only for images, or for a running sequence that computes the same
        prefix.
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
        """Plan the next chunk of a prompt, as far as the token budget, the images and the pages
        allow.
        """
        end = self._chunks.chunk_limit(sequence, builder.room(sequence.client)).end
        if end == run.planned:
            return
        parts = self._parts_of(sequence)
        for part in parts:
            end = part.cut(run, end)
        # To guarantee progress, the oldest sequence that can prefill, and has no step in flight,
        # may exceed the device's budget for embeddings by one image.
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
        """The number of pages that become free once the plans in flight have been applied."""
        return sum(len(flight.pages) for flight in self._flights)

    def _allocate(self, sequence: Sequence, run: Run, end: int) -> int:
        """Allocate pages for the tokens up to `end`, and return the end of the tokens that have
        pages.

        Uses free pages first, then evicts cached pages, then preempts younger sequences.
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
        """Preempt a running sequence. The caller must add it to the queue again.

        Tokens that plans in flight sample for it are discarded, and sampled again later.
        """
        self._release_run(sequence)
        self.running.remove(sequence)
        sequence.preempt()
        self.counts.preemptions += 1

    def _release_run(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        """Release the slot, pages and pins of a running sequence.

        Its full computed pages stay cached. The others become free once no plan in flight writes to
        them.
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
        """Apply the result of the oldest plan in flight, and return the deltas for the front end.

        Ignores rows whose sequences have ended or were preempted after the plan was made. Workers
        execute plans in order, so results arrive in order.
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
            # This happens before the row's pages are added to the prefix cache, so no other
            # sequence uses them.
            return [self._finish(sequence, "error", NOT_FINITE, code=InternalError.code)]
        deltas, end = [], row.start + row.length
        known = end < len(sequence.tokens)  # a grammar forced the token that was sampled
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
        """Record that the tokens up to `end` have valid KV.

        Full pages are added to the prefix cache, and images that are no longer used are released.
        """
        before = run.computed
        self._kv_cache.publish(sequence, run, end)
        for part in self._parts_of(sequence):
            part.computed(sequence, run, before)
        for key in [key for key in run.pins if not sequence.needs(key)] if run.pins else ():
            run.pins.remove(key)
            self.embeddings.unpin(key)
        if not self.limits.chunk_aware and before < sequence.images_end <= end:
            for key in sequence.last_use:  # some were encoded but never used
                self.image_scheduler.settle(key)

    def _report_pooled_output(
        self, sequence: Sequence, run: Run, pooled_output: PooledOutput
    ) -> Delta:
        """Return a delta with a pooled output.

        A sequence that generates no tokens finishes at the end of its prompt.
        """
        sequence.scored = run.computed
        if run.computed < sequence.prompt_length:
            return Delta(sequence.request.id, pooled_output=pooled_output)
        return replace(self._finish(sequence, "stop"), pooled_output=pooled_output)

    def _append(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> list[Delta]:
        """Append a generated token, and return deltas. For requests that are not streamed, tokens
        are reported in batches.
        """
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
        """End a sequence, release its resources, and return its final delta. The next plan closes
        its slot.
        """
        aside = sequence.idle and sequence is not self.idle_work.active
        if sequence.run is not None:
            self._release_run(sequence, reason)
            self.running.remove(sequence)
        elif not aside:
            self._leave_queue(sequence)
        sequence.finish()
        del self._ids[sequence.request.id]
        self._parts_by_sequence.pop(sequence, None)
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
        """Assert that every page is free, in the prefix cache, used by a sequence, or in flight."""
        runs = [s.run for s in self.running if s.run is not None]
        holders = [run.pages for run in runs] + [flight.pages for flight in self._flights]
        lines = [line for part in self._parts.built for line in part.audit(runs)]
        self._kv_cache.audit(holders, lines)
        self.image_scheduler.audit()
