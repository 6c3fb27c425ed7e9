"""The scheduler: what to compute next, and what came of it.

Owns every sequence, slot and page decision. Knows lengths, keys and token ids; nothing of tensors,
bytes or text.

    add -> plan -> (workers execute) -> apply -> plan -> ...

First come, first served. Each step takes running sequences oldest first: one token for each that
decodes, then chunks of prompts within the token budget, then new sequences. Whoever is older may
take pages from the youngest (which is computed again later), so that the oldest always makes
progress. A sequence whose pictures are not there yet does not stop the others.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from saccade.cache.content import overlapping
from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import Node, PrefixCache
from saccade.core.plan import Encode, PixelSlot, Plan, Sampled
from saccade.core.types import (
    Delta,
    FinishReason,
    Image,
    ImageKey,
    ImageOutcome,
    Request,
    Span,
    Tier,
    TokenLogprobs,
)
from saccade.sched.chunk import Reach, Sight, reach
from saccade.sched.draft import Draft
from saccade.sched.limits import GROWTH, Counts, SchedulerLimits, too_long
from saccade.sched.pictures import Notices, Pictures
from saccade.sched.sequence import Sequence, State
from saccade.sched.sharing import has_twin, why_not_in_prefix


class Scheduler:
    """`plan` and `apply` alternate; anything else may be called in between, at any time."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        prefix: PrefixCache | None,
        embeddings: EmbeddingCache,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.prefix = prefix
        self.embeddings = embeddings
        self.counts = Counts()
        self.running: list[Sequence] = []  # by order
        self.waiting: list[Sequence] = []  # by order
        self._eos = frozenset(eos_token_ids)
        self._ids: dict[str, Sequence] = {}
        self._pictures = Pictures(
            limits.look_ahead, limits.arena_patches, embeddings.on_disk, embeddings.saved()
        )
        self._slots = list(range(limits.max_running))[::-1]
        self._closing: list[int] = []
        # the arena was too small for all that was asked for: take any step that pixels allow
        self._starved = False
        self._refused: tuple[Sequence, int] | None = (
            None  # who did not fit, and how many pages could be had then
        )
        self._flight: tuple[int, Draft] | None = None  # planned, not yet applied

    # ---- requests and pixels come in

    @property
    def token_limit(self) -> int:
        """Tokens that one sequence may have, prompt and answer."""
        return min(self.limits.context_length, self.pool.capacity * self.pool.page_size)

    @property
    def idle(self) -> bool:
        """No request is alive and the workers hold nothing for one."""
        return not (self._ids or self._closing or self._flight or self._pictures.busy)

    def add(self, request: Request) -> list[Delta]:
        """Queue a request; its id must be new.

        One that can never be served gets its terminal delta at once.
        """
        assert request.id not in self._ids
        length = len(request.tokens)
        if length == 0:
            return [Delta(request.id, finish="error", error="the prompt has no tokens")]
        if length >= self.token_limit:
            return [
                Delta(
                    request.id,
                    finish="error",
                    error=too_long(length, self.token_limit, self.limits.context_length),
                )
            ]
        sequence = Sequence(request, order=self.counts.requests)
        self.counts.requests += 1
        self._ids[request.id] = sequence
        self.waiting.append(sequence)
        self._pictures.join(sequence)
        return []

    def abort(self, id: str) -> list[Delta]:
        """The client has left. No delta if the request has already ended."""
        return [self._finish(self._ids[id], "abort")] if id in self._ids else []

    def fail(self, id: str, error: str) -> list[Delta]:
        """End one request with an error, unless it has already ended."""
        return [self._finish(self._ids[id], "error", error)] if id in self._ids else []

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error."""
        return [self._finish(sequence, "error", error) for sequence in list(self._ids.values())]

    def pixels_ready(self, key: ImageKey, slot: PixelSlot) -> list[PixelSlot]:
        """Pixels lie in `slot`: the scheduler's until it is returned, here or in `Notices.done`."""
        return self._pictures.arrive(key, slot, self.embeddings.locate(key) is not None)

    def pixels_failed(self, key: ImageKey, error: str) -> list[Delta]:
        """End every request that cannot go on without these pixels."""
        self._pictures.fail(key)
        if self._pictures.has_arrived(key) or self.embeddings.locate(key) is not None:
            return []
        needy = [
            s
            for s in self._pictures.needed_by(key)
            if s.state is State.RUNNING or s.last_use[key] > self._cached(s)
        ]
        return [self._finish(sequence, "error", error) for sequence in needy]

    def yield_pixels(self) -> bool:
        """Make room in the arena for what is needed first. Whether there is more to plan for now
        than there was.

        For when the arena is full, and the last plan neither encoded nor computed a prompt: then
        what is held is of no use yet. It is given back in `Notices.done`, to be asked for again,
        unless what is needed first is among it. Legal at any time.
        """
        changed, self._starved = not self._starved, True
        for sequence in self.waiting:
            sequence.blocked = None
        key = self._needed_first()
        if key is not None and not self._pictures.has_arrived(key):
            changed = self._pictures.yield_for(key) or changed
        return changed

    def _needed_first(self) -> ImageKey | None:
        """The picture that the oldest sequence to lack one lacks first, but for those that come
        from disk.
        """
        for sequence in (*self.running, *self.waiting):
            computed = (
                sequence.computed if sequence.state is State.RUNNING else self._cached(sequence)
            )
            shown = (
                sequence.request.images[span.image].key
                for span in sequence.request.spans
                if span.end > computed
            )
            key = next((key for key in shown if not self.embeddings.ready(key)), None)
            if key is not None and not self.embeddings.on_disk(key):
                return key
        return None

    def take_notices(self) -> Notices:
        """What the front should hear, once."""
        return self._pictures.take_notices()

    # ---- plan

    def plan(self) -> Plan:
        """The next step.

        It must be applied, unless it is `empty`: then there is nothing to do before something else
        comes in.
        """
        assert self._flight is None, "plan before the last plan was applied"
        decoding = sum(sequence.decoding for sequence in self.running)
        draft = Draft(max(0, self.limits.chunk_tokens - decoding), self.limits.encode_patches)
        self._pictures.refused = False
        self._continue_running(draft)
        if self.waiting:
            self._admit_waiting(draft)
        if self._pictures.refused and not (draft.prefilled or draft.encode):
            self._make_room(draft)
        self._encode_ahead(draft)
        self._pictures.ask_ahead(self.embeddings.ready, self._cached)
        self._use_disk(draft)
        plan = draft.build(self.counts.steps, self._closing, self._pictures.reading)
        self._closing = []
        if not plan.empty:
            self.counts.steps += 1
            self._starved = self._starved and not plan.rows
            self._flight = (plan.step, draft)
        return plan

    def _make_room(self, draft: Draft) -> None:
        """Nothing can be prefilled, and there was no room to ask for all that would help: do with
        what is there, or give it back.
        """
        key = self._needed_first()
        if key is not None and not self._pictures.on_the_way(key) and self.yield_pixels():
            self._admit_waiting(draft)

    def _continue_running(self, draft: Draft) -> None:
        """Oldest first; the youngest, later in this loop, may lose their pages to whoever is before
        them.

        The youngest of all, if it cannot even decode, steps back too: it would keep pages and token
        budget from an older one.
        """
        size = self.pool.page_size
        for sequence in tuple(self.running):
            if sequence.state is not State.RUNNING:
                continue
            if not sequence.decoding:
                self._prefill(sequence, draft)
            elif (
                sequence.computed < len(sequence.pages) * size
                or self._claim(sequence, sequence.computed + 1) > sequence.computed
            ):
                draft.decode(sequence)
            else:
                self._preempt(sequence)

    def _admit_waiting(self, draft: Draft) -> None:
        """First come, first served for slots and pages; who only waits for pixels, or for an older
        twin's prefix, is passed over.
        """
        for sequence in tuple(self.waiting):
            if not self._slots or draft.tokens == 0:
                return
            if sequence.blocked is not None and not self._can_show(sequence.blocked):
                self._pictures.ask(sequence.blocked)
                continue
            if (
                self._refused is not None
                and self._refused[0] is sequence
                and self._available() <= self._refused[1]
            ):
                return
            path = self.prefix.find(sequence.content) if self.prefix else []
            start = len(path) * self.pool.page_size
            end, missing = self._reach(sequence, start, draft)
            short = end == start or (end - start < self.limits.worthwhile and not self._starved)
            sequence.blocked = missing[0] if missing and short else None
            if end == start or sequence.blocked is not None or self._twin_ahead(sequence, start):
                continue
            if not self._fits(sequence, path):
                self._refused = (sequence, self._available())
                return
            self._admit(sequence, path, draft)
            self._prefill(sequence, draft)

    def _admit(self, sequence: Sequence, path: list[Node], draft: Draft) -> None:
        node = self.prefix.hold(sequence.content, path) if self.prefix else None
        first = sequence.cached is None
        sequence.admit(
            self._slots.pop(), node, [step.page for step in path], len(path) * self.pool.page_size
        )
        self._refused = None
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda s: s.order)
        draft.open(sequence)
        if first:
            self.counts.prompt_tokens += sequence.prompt_length
            self.counts.cached_tokens += sequence.cached or 0
            self.counts.images_kv += len(sequence.found)
        for key, end in sequence.last_use.items():
            if end <= sequence.computed:
                self._pictures.settle(key)

    def _prefill(self, sequence: Sequence, draft: Draft) -> None:
        """The next chunk: as far as the token budget, the pictures and the pages go."""
        start = sequence.computed
        end, _ = self._reach(sequence, start, draft)
        if end == start:
            return
        oldest = not draft.prefilling
        draft.prefilling = True
        end = self._claim(sequence, end)
        end = self._show_pictures(sequence, start, end, draft, oldest)
        if end > start:
            draft.prefill(sequence, end)

    def _reach(self, sequence: Sequence, start: int, draft: Draft) -> Reach:
        goal = min(start + draft.tokens, len(sequence.tokens))
        if start == goal or not sequence.last_use:
            return Reach(goal, [])
        found = reach(
            sequence.content,
            start,
            goal,
            Sight(self.embeddings.ready, self._pictures.has_arrived, draft.patches),
        )
        for key in found.missing:
            self._pictures.ask(key)
        return found

    def _show_pictures(
        self, sequence: Sequence, start: int, end: int, draft: Draft, oldest: bool
    ) -> int:
        """Bring the pictures of a chunk to the device, encode those that are nowhere. Returns where
        the device's budget cuts the chunk.

        The oldest sequence that can prefill may exceed the budget by one picture rather than wait,
        so that somebody always goes on.
        """
        shown = [
            (span, sequence.request.images[span.image])
            for span in overlapping(sequence.request.spans, start, end)
        ]
        keys = {image.key for _, image in shown}
        for span, image in shown:
            cut = max(start, span.start)
            if not self._show(
                sequence, span, image, draft, keys, may_exceed=oldest and cut == start
            ):
                return cut
        return end

    def _show(
        self,
        sequence: Sequence,
        span: Span,
        image: Image,
        draft: Draft,
        spare: set[ImageKey],
        may_exceed: bool,
    ) -> bool:
        """Have an image on the device in this step, pinned for `sequence`; whether it is."""
        key, lost = image.key, None
        place = self.embeddings.locate(key)
        if place != "device":
            # What was ready may have had to go for another picture of this chunk.
            here = self.embeddings.ready(key) or self._pictures.has_arrived(key)
            if not here or not (may_exceed or self.embeddings.fits(image.num_tokens)):
                return False
        if span.image not in sequence.found:
            self.embeddings.look_up(key)
        if place in ("host", "staged"):
            draft.moves += self.embeddings.bring(key, spare)
            self._pictures.brought(key)
        elif place is None:
            lost = self.embeddings.why_missing(key)
            self._encode(image, draft, spare)
        if key not in sequence.pins:
            self.embeddings.pin(key)
            sequence.pins.add(key)
        if span.image not in sequence.found:
            above = why_not_in_prefix(self.prefix, self.pool.page_size, sequence, span.end, lost)
            tier: Tier | None = "disk" if place == "staged" else place
            sequence.found[span.image] = ImageOutcome(
                span.image, "embedding" if tier else "none", above, lost, tier
            )
            self.counts.images_embedding += tier is not None
        return True

    def _encode(self, image: Image, draft: Draft, spare: set[ImageKey]) -> None:
        draft.moves += self.embeddings.admit(image.key, image.num_tokens, spare)
        draft.encode.append(Encode(image.key, image.grid, self._pictures.take(image.key)))
        draft.patches.spent += image.num_patches
        draft.save_picture(image.key, *self.embeddings.save(image.key))
        self.counts.images_encoded += 1
        self.counts.patches_encoded += image.num_patches

    def _encode_ahead(self, draft: Draft) -> None:
        """Spend what this step's patch budget has left on the pictures of the next chunks, in
        order, within the device's budget.
        """
        for sequence, end in draft.prefilled:
            spans = tuple(overlapping(sequence.request.spans, end, end + self.limits.chunk_tokens))
            keys = {sequence.request.images[span.image].key for span in spans}
            for span in spans:
                image = sequence.request.images[span.image]
                if self.embeddings.locate(image.key) == "device":
                    continue
                if not (
                    self._pictures.has_arrived(image.key)
                    and draft.patches.allows(image.num_patches, 0)
                ):
                    break
                if not self._show(sequence, span, image, draft, keys, may_exceed=False):
                    break

    def _use_disk(self, draft: Draft) -> None:
        """Begin the reads that were asked for, and let go of what was read and is not needed."""
        fetch, unstage = self._pictures.take_reads()
        for key in fetch:
            if self.embeddings.on_disk(key):
                draft.moves.append(self.embeddings.fetch(key))
            else:  # something saved in this step has taken its place
                self._pictures.fetched(key, whole=False)
        draft.moves += [self.embeddings.unstage(key) for key in unstage]
        draft.moves += self.embeddings.surplus
        self.embeddings.surplus = []

    def _twin_ahead(self, sequence: Sequence, start: int) -> bool:
        """Whether a running sequence is just computing a prompt that `sequence` can soon share."""
        return self.prefix is not None and has_twin(
            sequence, self.running, start, start + self.limits.worthwhile
        )

    def _can_show(self, key: ImageKey) -> bool:
        return self._pictures.has_arrived(key) or self.embeddings.ready(key)

    # ---- pages

    def _claim(self, sequence: Sequence, end: int) -> int:
        """Get pages up to token `end`: free ones, then unused cached ones, then those of younger
        sequences. Returns how far they go.
        """
        missing = self.pool.pages_for(end) - len(sequence.pages)
        if missing > 0:
            while not self._make_free(missing) and self.running[-1] is not sequence:
                self._preempt(self.running[-1])
            after = sequence.pages[-1] if sequence.pages else None
            sequence.pages += self.pool.take(min(missing, self.pool.free), after)
        return min(end, len(sequence.pages) * self.pool.page_size)

    def _make_free(self, pages: int) -> bool:
        if self.pool.free < pages and self.prefix:
            self.prefix.evict(pages - self.pool.free)
        return self.pool.free >= pages

    def _pages_soon(self, sequence: Sequence) -> int:
        """Pages for the tokens there are and the next few."""
        most = min(sequence.prompt_length + sequence.request.sampling.max_tokens, self.token_limit)
        return self.pool.pages_for(min(len(sequence.tokens) + GROWTH, most))

    def _available(self) -> int:
        """Pages that are free or can be, less what running sequences will soon take."""
        evictable = self.prefix.evictable if self.prefix else 0
        owed = sum(
            max(0, self._pages_soon(sequence) - len(sequence.pages)) for sequence in self.running
        )
        return self.pool.free + evictable - owed

    def _fits(self, sequence: Sequence, path: list[Node]) -> bool:
        """Whether all tokens and the next few find pages without taking any from the running
        sequences.
        """
        unheld = sum(self.pool.refs[node.page] == 1 for node in path)
        return self._available() - unheld >= self._pages_soon(sequence) - len(path)

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up(sequence)
        self.running.remove(sequence)
        sequence.preempt()
        insort(self.waiting, sequence, key=lambda s: s.order)
        self.counts.preemptions += 1

    def _give_up(self, sequence: Sequence) -> None:
        """Take slot, pages and pins of a running sequence back; its whole computed pages stay
        findable.
        """
        if self.prefix and sequence.node is not None:
            self.prefix.leave(
                sequence.node,
                sequence.content,
                sequence.pages,
                sequence.computed // self.pool.page_size,
            )
        else:
            self.pool.release(sequence.pages)
        for key in sequence.pins:
            self.embeddings.unpin(key)
        self._slots.append(sequence.slot)
        self._closing.append(sequence.slot)
        sequence.pages, sequence.node = [], None
        sequence.pins.clear()

    # ---- apply

    def apply(self, plan: Plan, sampled: Sampled) -> list[Delta]:
        """Take in what the workers drew.

        Rows of sequences that have ended meanwhile are ignored.
        """
        assert self._flight is not None and self._flight[0] == plan.step
        draft, self._flight = self._flight[1], None
        for encode in plan.encode:
            self._pictures.encoded(encode)
        for key, event in sampled.disk:
            if event == "not saved":
                self.embeddings.not_saved(key)
            else:
                self.embeddings.fetched(key, event == "read")
                self._pictures.fetched(key, event == "read")
        deltas: list[Delta] = []
        drawn = zip(sampled.tokens, sampled.logprobs, strict=True)
        for row, sequence in zip(plan.rows, draft.sequences, strict=True):
            token, logprobs = next(drawn) if row.sample else (-1, None)
            if sequence.state is not State.RUNNING:
                continue
            self._advance(sequence, row.start + row.length)
            if row.sample:
                deltas.append(self._append(sequence, token, logprobs))
        return deltas

    def _advance(self, sequence: Sequence, computed: int) -> None:
        """KV is valid up to `computed`: publish whole pages, let go of pictures that are done
        with.
        """
        whole = computed // self.pool.page_size
        crossed = whole > sequence.computed // self.pool.page_size
        sequence.advance(computed)
        if crossed and self.prefix and sequence.node is not None:
            sequence.node = self.prefix.extend(
                sequence.node, sequence.content, sequence.pages, whole
            )
        for key in (
            [key for key in sequence.pins if not sequence.needs(key)] if sequence.pins else ()
        ):
            sequence.pins.remove(key)
            self.embeddings.unpin(key)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> Delta:
        sequence.tokens.append(token)
        self.counts.generated_tokens += 1
        reason = self._reason(sequence, token)
        given = () if logprobs is None else (logprobs,)
        if reason is not None:
            return self._finish(sequence, reason, None, (token,), given)
        if sequence.reported:
            return Delta(sequence.request.id, (token,), given)
        sequence.reported = True
        return Delta(
            sequence.request.id,
            (token,),
            given,
            cached_tokens=sequence.cached or 0,
            images=sequence.outcomes(),
        )

    def _reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why the answer ends with `token`, if it does.

        The token that ends it does not count towards `min_tokens`.
        """
        sampling = sequence.request.sampling
        ends = token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos)
        if ends and sequence.output_length > sampling.min_tokens:
            return "stop"
        if (
            sequence.output_length >= sampling.max_tokens
            or len(sequence.tokens) >= self.token_limit
        ):
            return "length"
        return None

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> Delta:
        """End a sequence and free all it has. Its slot is closed by the next plan."""
        if sequence.state is State.RUNNING:
            self._give_up(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.finish()
        del self._ids[sequence.request.id]
        self._pictures.leave(sequence)
        if self._refused is not None and self._refused[0] is sequence:
            self._refused = None
        if sequence.reported:
            return Delta(sequence.request.id, tokens, logprobs, reason, error)
        return Delta(
            sequence.request.id,
            tokens,
            logprobs,
            reason,
            error,
            sequence.cached or 0,
            sequence.outcomes(),
        )

    # ---- for metrics and tests

    def _cached(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that lie in the prefix cache."""
        return len(self.prefix.find(sequence.content)) * self.pool.page_size if self.prefix else 0

    def audit(self) -> None:
        """Assert that every page is accounted for: free, the trie's, or a sequence's."""
        holders: list[Iterable[int]] = [sequence.pages for sequence in self.running]
        self.pool.audit([*holders, self.prefix.owned()] if self.prefix else holders)
