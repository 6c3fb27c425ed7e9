"""A part of a step: an optional feature of a scheduler that owns its state by sequence.

`Parts` builds those that the limits, the caches and the requests ask for. The scheduler calls its
parts at the moments below, and knows none by name. A part answers the moments that it needs, and
inherits the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.metrics import Metrics
from saccade.core.plan import Row, StepResult
from saccade.core.types import FinishReason
from saccade.plugins import builders, plugins
from saccade.sched.builder import InFlightPlan, PlanBuilder, PlannedOutcome
from saccade.sched.limits import SchedulerLimits
from saccade.sched.sequence import Run, Sequence

if TYPE_CHECKING:
    from saccade.sched.parts.page_loads import PageLoads


@dataclass(frozen=True, slots=True)
class PartContext:
    """What a scheduler's parts are built from. prefix: None if the prefix cache is off."""

    limits: SchedulerLimits
    pool: PagePool
    prefix: PrefixCache | None
    embeddings: EmbeddingCache
    token_limit: int  # most tokens in one sequence, prompt and answer


class StepPart:
    """The moments of a run, from its admission to its end, and those of a plan in flight."""

    def admitted(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:
        """Start a run, which resumes after the last of its cached pages."""

    def decode(
        self,
        sequence: Sequence,  # noqa: ARG002
        run: Run,  # noqa: ARG002
        builder: PlanBuilder,  # noqa: ARG002
        parts: Iterable[StepPart],  # noqa: ARG002
    ) -> Row | None:
        """Plan the newest token's row, and rows behind it. None leaves that to others.

        parts: all that the sequence has.
        """
        return None

    def limit_drafts(self, run: Run, most: int) -> int:  # noqa: ARG002
        """Return how many draft tokens, up to `most`, may follow the next row in its step."""
        return most

    def first_shared(self, sequence: Sequence) -> int | None:  # noqa: ARG002
        """Return after which tokens a waiting sequence's prefix can first be shared, or None for
        after any page.
        """
        return None

    def cut(self, run: Run, end: int) -> int:  # noqa: ARG002
        """Return the end, perhaps an earlier one, of a chunk that could extend to `end`."""
        return end

    def limit_steps(self, run: Run, most: int) -> int:  # noqa: ARG002
        """Return how many steps, up to `most`, a plan may hold where the run only decodes.

        `planned` and `decode` see the first step alone.
        """
        return most

    def planned(self, run: Run, row: Row, builder: PlanBuilder) -> None:
        """Take note of a planned row, the last in a chunk."""

    def mask(self, sequence: Sequence, run: Run, row: Row) -> bytes | None:  # noqa: ARG002
        """Return the mask of a row in flight. None leaves it to the grammar alone."""
        return None

    def outcomes(
        self,
        flight: InFlightPlan,  # noqa: ARG002
        result: StepResult,  # noqa: ARG002
        outcomes: Iterable[PlannedOutcome],
    ) -> Iterable[PlannedOutcome]:
        """Return the outcomes that count, for rows whose sequences may end meanwhile."""
        return outcomes

    def skipped(self, run: Run) -> None:
        """Take back what was noted of tokens beyond `run.planned`, whose steps were skipped."""

    def computed(self, sequence: Sequence, run: Run, before: int) -> None:
        """Use KV, newly valid and findable from `before` up to `run.computed`."""

    def left(self, sequence: Sequence, run: Run, reason: FinishReason | None) -> None:
        """End a run, whose last whole page is `run.node`. reason: None if preempted."""

    def flush(self) -> None:
        """Forget what the caches forget."""

    def measure(self, metrics: Metrics) -> None:
        """Copy counts and levels into the metrics that users see."""

    def audit(self, runs: Iterable[Run]) -> Iterable[int]:  # noqa: ARG002
        """Assert the part's invariants. Returns the cache's lines that it holds for states."""
        return ()


class Parts:
    """The parts of a scheduler."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        # parts in each sequence's steps
        self.every: tuple[StepPart, ...] = tuple(
            build(context) for build in builders(lambda plugin: plugin.step_part, context)
        )
        loads = builders(lambda plugin: plugin.page_loads, context)
        # loads of pages from other tiers, or None
        self.loads: PageLoads | None = loads[0](context) if loads else None
        self._more: tuple[StepPart, ...] = ()

    @property
    def asking(self) -> tuple[StepPart, ...]:
        """Return the parts for sequences that ask something from the caches: `every`, and more."""
        if not self._more:
            names = [plugin.cache_part for plugin in plugins() if plugin.cache_part]
            self._more = tuple(resolve_name(name)(self._context) for name in names)
        return (*self.every, *self._more)

    @property
    def built(self) -> tuple[StepPart, ...]:
        """Return all parts built so far."""
        return (*self.every, *self._more)
