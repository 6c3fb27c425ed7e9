"""A part of a step: an optional feature of a scheduler that owns its state by sequence.

Owns nothing. The scheduler calls its parts in order at the moments below, and knows none by name. A
part answers the moments that it needs, and inherits the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from saccade.core.plan import Row, StepResult
from saccade.core.types import FinishReason
from saccade.sched.builder import Flight, PlanBuilder, PlannedOutcome
from saccade.sched.sequence import Run, Sequence


class StepPart:
    """The moments of a run, from its admission to its end, and those of a plan in flight."""

    def admitted(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:
        """Begin a run, which goes on from the last of its cached pages."""

    def decode(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> Row | None:  # noqa: ARG002
        """Plan the newest token's row, and rows behind it. None leaves that to others."""
        return None

    def cut(self, run: Run, end: int) -> int:  # noqa: ARG002
        """Return the end, perhaps an earlier one, of a chunk that could go to `end`."""
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
        flight: Flight,  # noqa: ARG002
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

    def audit(self, runs: Iterable[Run]) -> Iterable[int]:  # noqa: ARG002
        """Assert the part's invariants. Returns the cache's lines that it holds for states."""
        return ()
