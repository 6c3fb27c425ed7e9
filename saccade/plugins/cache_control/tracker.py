"""Cache options of requests: pins computed pages, and explains misses.

It records the breakpoints that a sequence has passed, selects what the caches should pin, and
computes the report in the answer.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from saccade.core.types import CacheMiss, CacheReport
from saccade.plugins.cache_control.prompt_history import PromptHistory
from saccade.sched.builder import PlanBuilder
from saccade.sched.parts.step_part import PartContext, StepPart
from saccade.sched.sequence import Run, Sequence


@dataclass(slots=True)
class CachedPrompt:
    """How much of a prompt breakpoints have pinned."""

    passed: int = 0  # the number of breakpoints passed in the current run
    tokens: int = 0  # the length of the pinned prefix
    # newly computed tokens in it, by the lifetime of their pin in seconds
    written: Counter[int] = field(default_factory=Counter)
    missed: CacheMiss | None = None  # why the cached prefix is not longer, if requested


class CacheControlTracker(StepPart):
    """Pins prefixes at breakpoints and explains cache misses, for the sequences that request it."""

    def __init__(self, context: PartContext) -> None:
        self._prefix = prefix = context.prefix
        self._embeddings = context.embeddings
        self._page_size = context.pool.page_size
        clock = prefix.pins.clock if prefix else time.monotonic
        self._recall = PromptHistory(self._page_size, clock)
        self._prompts: WeakKeyDictionary[Sequence, CachedPrompt] = WeakKeyDictionary()

    def admitted(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:  # noqa: ARG002
        """Explain a miss when the sequence is first admitted."""
        if (kept := self._prompts.get(sequence)) is not None:
            kept.passed = 0
            return
        kept = self._prompts[sequence] = CachedPrompt()
        if sequence.request.caching.diagnose:
            kept.missed = self._explain(sequence, run.computed)
            self._report(sequence, kept)

    def _explain(self, sequence: Sequence, cached: int) -> CacheMiss | None:
        if self._prefix is None:
            return CacheMiss("cache_off", 0, sequence.prompt_length)
        missed = self._recall.explain(sequence.request, cached)
        if missed is None or missed.reason not in ("evicted", "expired"):
            return missed
        slow = sequence.account.slow_reads
        return replace(missed, reason="read_too_slow") if slow else missed

    def computed(self, sequence: Sequence, run: Run, before: int) -> None:
        """Pin the prefixes of breakpoints that were passed."""
        request, kept = sequence.request, self._prompts[sequence]
        marks = request.caching.breakpoints
        while kept.passed < len(marks) and marks[kept.passed][0] <= run.computed:
            tokens, seconds = marks[kept.passed]
            # The prefix of a later breakpoint includes this one, so use its lifetime if longer.
            longest = max(seconds for _, seconds in marks[kept.passed :])
            kept.passed += 1
            self._keep(sequence, run, tokens, seconds, longest)
        if before < sequence.prompt_length <= run.computed:
            self._recall.add_prompt(request, kept.tokens)

    def _keep(self, sequence: Sequence, run: Run, tokens: int, seconds: int, longest: int) -> None:
        request, kept, size = sequence.request, self._prompts[sequence], self._page_size
        for span in request.spans:
            if span.end <= tokens:
                key = sequence.shown.images[span.image].key
                self._embeddings.pin_for_client(key, sequence.client, seconds)
        if self._prefix is None or run.node is None:
            return
        pages = self._prefix.pin(
            run.node, sequence.content, tokens // size, sequence.client, seconds
        )
        known = max(kept.tokens, sequence.cached or 0)
        if pages * size > known:
            kept.written[longest] += pages * size - known
        kept.tokens = max(kept.tokens, pages * size)
        self._report(sequence, kept)

    def _report(self, sequence: Sequence, kept: CachedPrompt) -> None:
        written = tuple(sorted(kept.written.items()))
        sequence.account.caching = CacheReport(written, kept.missed)

    def flush(self) -> None:
        """Record that the cache was flushed."""
        self._recall.flushed()
