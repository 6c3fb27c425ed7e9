"""The interface for loading the KV pages of waiting sequences from other tiers.

`PageLoads` owns a page while it is loaded. The prefix cache owns it afterwards.
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
    """Loads KV pages from other tiers into the prefix cache."""

    @property
    def busy(self) -> bool:
        """Return True if any page is being loaded."""
        ...

    @property
    def unsaved(self) -> bool:
        """Return True if there are pages that must still be written to another tier."""
        ...

    @property
    def holders(self) -> Iterator[list[int]]:
        """Yield, for each load, the pages that it has allocated."""
        ...

    @property
    def lines(self) -> Iterator[int]:
        """Yield the slots that loads have allocated for states."""
        ...

    def count_coming(self, sequence: Sequence, path: Seq[Node]) -> int:
        """Return how many pages after `path`, the sequence's cached pages, can be loaded."""
        ...

    def awaits(self, sequence: Sequence, path: Seq[Node], has_room: Callable[[], bool]) -> bool:
        """Start to load pages if they are worth waiting for. Return True if the sequence should
        wait.

        If this returns False, the sequence continues without the pages that could be loaded.

        path: the sequence's cached pages.
        has_room: returns True if there are enough free pages to admit the sequence now.
        """
        ...

    def admitted(self, sequence: Sequence, computed: int) -> None:
        """Record which cached tokens of a sequence were loaded. Call this when it is admitted.

        computed: the number of cached tokens.
        """
        ...

    def left(self, sequence: Sequence) -> None:
        """Record that a sequence was preempted or has finished, so that it may load pages again."""
        ...

    def end_wait(self, sequence: Sequence) -> None:
        """Stop waiting for the loads of a sequence, if there are any. Loaded pages stay cached."""
        ...

    def begin_plan(self, *, idle: bool) -> None:
        """Update the loads at the start of a planning pass.

        idle: True to also write pages of finished sequences to other tiers.
        """
        ...

    def take_moves(self) -> PageMoves:
        """Return the moves of pages between tiers for the plan, and clear them."""
        ...

    def applied(
        self, flight: InFlightPlan, result: StepResult, later: Iterable[InFlightPlan]
    ) -> None:
        """Apply the result of a plan.

        later: the plans in flight after it.
        """
        ...

    def flush(self, disk: bool) -> None:
        """Cancel all loads, and clear the prefix cache and the other tiers.

        disk: True to also clear the disk.
        """
        ...

    def measure(self, metrics: Metrics, counts: Counts) -> None:
        """Copy counters and gauges to `metrics`.

        counts: the scheduler's counters.
        """
        ...
