"""Optional features of the scheduler, called parts, each with its own state per sequence.

`Parts` creates the parts that the limits, the caches and the requests require. The scheduler calls
the methods of `StepPart` on each part, and depends on no particular one. A part overrides only the
methods that it uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.metrics import Metrics
from saccade.core.plan import Row, StepResult
from saccade.core.types import FinishReason
from saccade.plugins import builder, builders, import_field
from saccade.sched.builder import InFlightPlan, PlanBuilder, PlannedOutcome
from saccade.sched.limits import SchedulerLimits
from saccade.sched.sequence import Run, Sequence

if TYPE_CHECKING:
    from saccade.sched.parts.page_loads import PageLoads


@dataclass(frozen=True, slots=True)
class PartContext:
    """The argument of a part's constructor."""

    limits: SchedulerLimits
    pool: PagePool
    prefix: PrefixCache | None  # None if the prefix cache is disabled
    embeddings: EmbeddingCache
    token_limit: int  # maximum tokens in one sequence, prompt and generated tokens


class StepPart:
    """The callbacks of a part. The scheduler calls them while a sequence runs, from its admission
    to its end, and for plans in flight.
    """

    def admitted(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:
        """A sequence starts to run, after the last of its cached pages."""

    def decode(
        self,
        sequence: Sequence,  # noqa: ARG002
        run: Run,  # noqa: ARG002
        builder: PlanBuilder,  # noqa: ARG002
        parts: Iterable[StepPart],  # noqa: ARG002
    ) -> Row | None:
        """Plan the row of the newest token, and rows of draft tokens after it. Return None to let
        another part, or the scheduler, plan it.

        parts: all parts of the sequence.
        """
        return None

    def limit_drafts(self, run: Run, most: int) -> int:  # noqa: ARG002
        """Return how many draft tokens, up to `most`, may follow the next row in its step."""
        return most

    def first_shared(self, sequence: Sequence) -> int | None:  # noqa: ARG002
        """Return the number of tokens after which a waiting sequence's prefix can first be shared,
        or None if it can be shared after any page.
        """
        return None

    def cut(self, run: Run, end: int) -> int:  # noqa: ARG002
        """Return the end of a chunk that could extend to `end`: `end`, or an earlier position."""
        return end

    def limit_steps(self, sequence: Sequence, run: Run, rows: int, most: int) -> int:  # noqa: ARG002
        """Return how many steps, up to `most`, a plan may contain while the run decodes.

        rows: the number of running sequences, which all decode.

        `planned` and `decode` are called for the first of these steps only.
        """
        return most

    def planned(self, run: Run, row: Row, builder: PlanBuilder) -> None:
        """A row of a run was planned. For a chunk with several rows, this is the last one."""

    def mask(self, sequence: Sequence, run: Run, row: Row) -> bytes | None:  # noqa: ARG002
        """Return the mask of a row in flight, or None to use the mask of the grammar."""
        return None

    def outcomes(
        self,
        flight: InFlightPlan,  # noqa: ARG002
        result: StepResult,  # noqa: ARG002
        outcomes: Iterable[PlannedOutcome],
    ) -> Iterable[PlannedOutcome]:
        """Filter the outcomes of a step. The scheduler applies those that are returned. Sequences
        may end meanwhile.
        """
        return outcomes

    def skipped(self, run: Run) -> None:
        """Steps were skipped: undo the records for tokens from `run.planned` on."""

    def computed(self, sequence: Sequence, run: Run, before: int) -> None:
        """The KV from `before` to `run.computed` is now valid, and its full pages are in the prefix
        cache.
        """

    def left(self, sequence: Sequence, run: Run, reason: FinishReason | None) -> None:
        """A run has ended. `run.node` is its last full page. reason: None if it was preempted."""

    def flush(self) -> None:
        """Drop state that refers to cached content, when the caches are cleared."""

    def measure(self, metrics: Metrics) -> None:
        """Copy counters and gauges to the metrics."""

    def audit(self, runs: Iterable[Run]) -> Iterable[int]:  # noqa: ARG002
        """Assert the part's invariants. Returns the slots of the state memory that it uses."""
        return ()


class Parts:
    """The parts of a scheduler."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        # the parts that every sequence uses
        self.every: tuple[StepPart, ...] = tuple(
            build(context)
            for build in builders(lambda plugin: plugin.scheduling.step_part, context)
        )
        load = builder(lambda plugin: plugin.caches.page_loads, context)
        # loads of pages from other tiers, or None
        self.loads: PageLoads | None = load(context) if load else None
        self._more: tuple[StepPart, ...] = ()

    @property
    def asking(self) -> tuple[StepPart, ...]:
        """The parts for sequences with cache options: `every`, and some more, which are created on
        first use.
        """
        if not self._more:
            builds = import_field(lambda plugin: plugin.scheduling.cache_part)
            self._more = tuple(build(self._context) for build in builds)
        return (*self.every, *self._more)

    @property
    def built(self) -> tuple[StepPart, ...]:
        """All parts created so far."""
        return (*self.every, *self._more)
