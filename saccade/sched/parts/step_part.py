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
    """The limits and caches that a part's constructor gets."""

    limits: SchedulerLimits
    pool: PagePool
    prefix: PrefixCache | None  # None if the prefix cache is disabled
    embeddings: EmbeddingCache
    token_limit: int  # maximum tokens in one sequence, prompt and generated tokens


class StepPart:
    """An optional feature. The scheduler calls its methods for plans in flight, and while a
    sequence runs.
    """

    def admitted(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:
        """A sequence starts to run. Its first row follows the last of its cached pages."""

    def decode(
        self,
        sequence: Sequence,  # noqa: ARG002
        run: Run,  # noqa: ARG002
        builder: PlanBuilder,  # noqa: ARG002
        parts: Iterable[StepPart],  # noqa: ARG002
    ) -> Row | None:
        """Plan the row of the newest token and rows of draft tokens after it, or return None.

        None lets another part, or the scheduler, plan the row.

        parts: all parts of the sequence.
        """
        return None

    def limit_drafts(self, run: Run, most: int) -> int:  # noqa: ARG002
        """Return how many draft tokens, up to `most`, may follow the next row in its step."""
        return most

    def first_shared(self, sequence: Sequence) -> int | None:  # noqa: ARG002
        """Return after how many tokens a waiting sequence's prefix can first be shared.

        None: it can be shared after any page.
        """
        return None

    def cut(self, run: Run, end: int) -> int:  # noqa: ARG002
        """Return where a chunk that could extend to `end` should end: at `end` or earlier."""
        return end

    def limit_steps(self, sequence: Sequence, run: Run, rows: int, most: int) -> int:  # noqa: ARG002
        """Return how many steps, up to `most`, a plan may contain while the run decodes.

        `planned` and `decode` are called for the first of these steps only.

        rows: the number of running sequences, which all decode.
        """
        return most

    def planned(self, run: Run, row: Row, builder: PlanBuilder) -> None:
        """A row of a run was planned. If a chunk has more than one row, this is its last one."""

    def mask(self, sequence: Sequence, run: Run, row: Row) -> bytes | None:  # noqa: ARG002
        """Return the mask of a row in flight, or None to use the mask of the grammar."""
        return None

    def outcomes(
        self,
        flight: InFlightPlan,  # noqa: ARG002
        result: StepResult,  # noqa: ARG002
        outcomes: Iterable[PlannedOutcome],
    ) -> Iterable[PlannedOutcome]:
        """Return the outcomes of a step that the scheduler should apply.

        Sequences may end while the scheduler iterates over them.
        """
        return outcomes

    def skipped(self, run: Run) -> None:
        """Steps were skipped. Undo what was recorded for tokens from `run.planned` on."""

    def computed(self, sequence: Sequence, run: Run, before: int) -> None:
        """The KV from `before` to `run.computed` is now valid. Its full pages are in the prefix
        cache.
        """

    def left(self, sequence: Sequence, run: Run, reason: FinishReason | None) -> None:
        """A run has ended. `run.node` is its last full page.

        reason: why the sequence finished, or None if it was preempted.
        """

    def flush(self) -> None:
        """The caches are cleared. Drop state that refers to cached content."""

    def measure(self, metrics: Metrics) -> None:
        """Copy counters and gauges to `metrics`."""

    def audit(self, runs: Iterable[Run]) -> Iterable[int]:  # noqa: ARG002
        """Assert the part's invariants, and return the slots for states that it uses."""
        return ()


class Parts:
    """Creates and stores the parts of a scheduler."""

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
        """The parts for sequences with cache options: `every`, and further ones created on first
        use.
        """
        if not self._more:
            builds = import_field(lambda plugin: plugin.scheduling.cache_part)
            self._more = tuple(build(self._context) for build in builds)
        return (*self.every, *self._more)

    @property
    def built(self) -> tuple[StepPart, ...]:
        """All parts created so far."""
        return (*self.every, *self._more)
