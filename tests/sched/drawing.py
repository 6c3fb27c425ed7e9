"""A worker without tensors for rows with masks: draws what a mask allows, as random weights would,
and checks that every row is of the tokens that the worker would know.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.config import EmbeddingBudgets
from saccade.core.plan import Masks, Plan, StepResult
from saccade.core.types import Delta, Request, SamplingParams
from saccade.plugins.grammar.matchers import SLOW_SECONDS, Matchers, MatcherState
from saccade.sched.limits import DraftLimits, SchedulerLimits
from saccade.sched.scheduler import GenerationScheduler
from tests.text.lexicons import DEMO_ENDS, DEMO_VOCAB, demo_lexicon

THREADS = ThreadPoolExecutor(1)
_CLOSING = {token for text in '"}]' for token in demo_lexicon().tokenize_str(text)} | {*DEMO_ENDS}
_NEXT = {*demo_lexicon().tokenize_str(",")}


@dataclass
class Answer:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    code: str | None = None

    @property
    def text(self) -> str:
        """Without the end token."""
        shown = [token for token in self.tokens if token not in DEMO_ENDS]
        return demo_lexicon().decode_bytes(shown).decode()


class Drawing:
    """A scheduler, and what carries its plans out. `depth`: plans in flight. `slow_seconds`: as in
    `MatcherState`.
    """

    def __init__(
        self,
        depth: int = 2,
        pages: int = 4096,
        slow_seconds: float = SLOW_SECONDS,
        drafts: int = 0,
        chunk: int = 512,
        *,
        batch_invariant: bool = True,
    ) -> None:
        drafting = DraftLimits(drafts)
        limits = SchedulerLimits(
            512, chunk, 1 << 20, 1 << 16, drafts=drafting, batch_invariant=batch_invariant
        )
        pool = PagePool(pages, 16)
        embeddings = EmbeddingCache(EmbeddingBudgets(1 << 20), 8)
        self.scheduler = GenerationScheduler(limits, pool, PrefixCache(pool), embeddings, DEMO_ENDS)
        self.matchers = Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS)
        self.answers: dict[str, Answer] = {}
        self.plans: list[Plan] = []
        self._depth = depth
        self._slow_seconds = slow_seconds
        self._slots: dict[int, list[int]] = {}
        self._opened: dict[int, int] = {}  # tokens
        self._seeds: dict[int, int] = {}
        self._guessing: set[int] = set()
        self._flights: deque[Plan] = deque()
        self._masks: Masks | None = None
        self._woken = Event()

    def add(
        self, id: str, grammar: str = "", prompt: Sequence[int] = (5, 6, 7), **sampling: object
    ) -> None:
        """A request; its answers depend on its seed and its grammar alone."""
        params = SamplingParams(**{"max_tokens": 2000, **sampling})  # type: ignore[arg-type]
        request = Request(id, tuple(prompt), (), (), params, grammar=grammar)
        grammar_state = None
        if grammar:
            matcher = self.matchers.new_matcher(grammar)
            words = self.matchers.words
            grammar_state = MatcherState(
                matcher, words, THREADS, self._woken.set, self._slow_seconds
            )
        self.answers[id] = Answer()
        self._note(self.scheduler.add_request(request, grammar_state))

    def step(self) -> bool:
        """Plan as far as may be, then carry the oldest plan out. Whether there was one."""
        while len(self._flights) < self._depth:
            plan = self.scheduler.plan()
            if plan.empty:
                break
            self.plans.append(plan)
            self._flights.append(plan)
            self._take_masks()
        if not self._flights:
            return False
        plan, masks = self._flights.popleft(), self._masks
        self._masks = None
        self._note(self.scheduler.apply(self.result(plan, masks)))
        self._take_masks()
        self.scheduler.audit()
        return True

    def run(self) -> dict[str, Answer]:
        """Until every request has ended."""
        while not self.scheduler.idle:
            self._woken.clear()
            if not self.step():
                assert self._woken.wait(10), "nothing to do, and no mask is being made"
        return self.answers

    def result(self, plan: Plan, masks: Masks | None) -> StepResult:
        """What the worker answers."""
        return StepResult(plan.step, self._carry_out(plan, masks))

    def seed_of(self, slot: int) -> int:
        """Of the sequence in a slot."""
        return self._seeds[slot]

    def _take_masks(self) -> None:
        masks, deltas = self.scheduler.take_masks()
        if masks is not None:
            assert self._masks is None and masks.step == self._flights[0].step
            self._masks = masks
        self._note(deltas)

    def _carry_out(self, plan: Plan, masks: Masks | None) -> tuple[int, ...]:
        for slot in plan.close:
            del self._slots[slot]
        for opened in plan.open:
            self._slots[opened.slot] = list(opened.tokens)
            self._guessing.discard(opened.slot)
            self._opened[opened.slot] = len(opened.tokens)
            self._seeds[opened.slot] = opened.sampling.seed
        masked = sum(row.masked for row in plan.rows)
        assert bool(masked) == (masks is not None)
        lines = iter(masks.rows().view(np.uint8) if masks else ())
        drawn = []
        decoding = [not row.tokens and row.start >= self._opened[row.slot] for row in plan.rows]
        assert decoding == sorted(decoding, reverse=True), "decode rows must come first"
        for row in plan.rows:
            tokens, end = self._slots[row.slot], row.start + row.length
            if row.tokens:  # the first of which may have been drawn
                start = end - len(row.tokens)
                if row.draft:
                    self._guessing.add(row.slot)
                if row.slot in self._guessing:  # what was drawn behind a wrong guess
                    del tokens[start:]
                if not row.draft:
                    self._guessing.discard(row.slot)
                assert tokens[start:] == list(row.tokens[: len(tokens) - start])
                tokens[start:] = row.tokens
            assert end <= len(tokens), "a row of tokens that the worker does not know"
            if not row.sample:
                continue
            bits = np.unpackbits(next(lines), bitorder="little") if row.masked else np.ones(480)
            token = self.draw(np.flatnonzero(bits).tolist(), self._seeds[row.slot], end)
            assert end == len(tokens)
            tokens.append(token)
            drawn.append(token)
        return tuple(drawn)

    def draw(self, allowed: list[int], seed: int, position: int) -> int:
        rng = random.Random(f"{seed} {position}")
        soon = rng.random() < min(0.9, 0.3 + position / 300)
        for kind in (_CLOSING, _NEXT) if soon else ():
            if found := [token for token in allowed if token in kind]:
                return rng.choice(found)
        return rng.choice(allowed)

    def _note(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            answer = self.answers[delta.id]
            assert answer.finish is None
            answer.tokens += delta.tokens
            answer.finish, answer.error, answer.code = delta.finish, delta.error, delta.code
