"""The interface for loading KV pages of waiting sequences from other tiers.

Pages that are being loaded belong to the loads. Once a load has ended, its pages belong to the
prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

from saccade.cache.prefix import Node
from saccade.core.metrics import Metrics
from saccade.core.plan import PageMoves, StepResult
from saccade.sched.builder import InFlightPlan
from saccade.sched.limits import Counts
from saccade.sched.sequence import Sequence


class PageLoads(Protocol):
    """The pages that are being loaded from other tiers, or could be."""

    @property
    def busy(self) -> bool:
        """Return True if a page is being loaded."""
        ...

    @property
    def unsaved(self) -> bool:
        """Return True if pages are still to be written to another tier."""
        ...

    @property
    def holders(self) -> Iterator[list[int]]:
        """Yield the pages of each load."""
        ...

    @property
    def lines(self) -> Iterator[int]:
        """Yield the slots that loads have allocated for states."""
        ...

    def count_coming(self, sequence: Sequence, path: Seq[Node]) -> int:
        """Return the number of pages after `path`, the sequence's cached pages, that can be
        loaded.
        """
        ...

    def awaits(self, sequence: Sequence, path: Seq[Node], has_room: Callable[[], bool]) -> bool:
        """Start to load pages if they are worth waiting for. Returns True if the sequence should
        wait.

        path: its cached pages.
        has_room: returns True if there are free pages for the sequence, so that it could be
            admitted now.

        If this returns False, the sequence continues without the pages that could be loaded.
        """
        ...

    def admitted(self, sequence: Sequence, computed: int) -> None:
        """Record which cached tokens of a sequence were loaded when it is admitted."""
        ...

    def left(self, sequence: Sequence) -> None:
        """Allow loads again for a sequence that was preempted or has finished."""
        ...

    def end_wait(self, sequence: Sequence) -> None:
        """Stop waiting for a sequence's loads, if there are any. Pages that have been loaded stay
        cached.
        """
        ...

    def begin_plan(self, *, idle: bool) -> None:
        """Update the loads at the start of a planning pass. idle: also write pages of finished
        sequences to other tiers.
        """
        ...

    def take_moves(self) -> PageMoves:
        """Return the moves of pages between tiers for the plan."""
        ...

    def applied(
        self, flight: InFlightPlan, result: StepResult, later: Iterable[InFlightPlan]
    ) -> None:
        """Apply the result of a plan. later: the plans in flight after it."""
        ...

    def flush(self, disk: bool) -> None:
        """Cancel all loads, and clear the prefix cache and the other tiers. disk: also clear the
        disk.
        """
        ...

    def measure(self, metrics: Metrics, counts: Counts) -> None:
        """Copy counters and gauges to the metrics."""
        ...
