"""The interface for loading pages of waiting sequences from other tiers.

The pages on their way are the loads' own. Once a load has ended, the trie owns its pages.
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
    """All pages that are loaded, or could be."""

    @property
    def busy(self) -> bool:
        """Return True with a page on its way."""
        ...

    @property
    def unsaved(self) -> bool:
        """Return True with pages still to be handed over to another tier."""
        ...

    @property
    def holders(self) -> Iterator[list[int]]:
        """Yield the pages of each load."""
        ...

    @property
    def lines(self) -> Iterator[int]:
        """Yield the lines that loads have taken for states."""
        ...

    def count_coming(self, sequence: Sequence, path: Seq[Node]) -> int:
        """Count the pages after `path`, its cached ones, that can be loaded for a sequence."""
        ...

    def awaits(self, sequence: Sequence, path: Seq[Node], has_room: Callable[[], bool]) -> bool:
        """Start reads if pages are worth waiting for. Returns True if the sequence should wait.

        path: its cached pages. has_room: whether it is its turn for pages. If it should resume,
        it runs without the pages that could be loaded.
        """
        ...

    def admitted(self, sequence: Sequence, computed: int) -> None:
        """Record which of a sequence's cached tokens were loaded, as it gets a slot."""
        ...

    def left(self, sequence: Sequence) -> None:
        """Allow loads again for a sequence that has lost its slot."""
        ...

    def end_wait(self, sequence: Sequence) -> None:
        """End a sequence's wait, if it waits. Loaded pages are cached."""
        ...

    def begin_plan(self, *, idle: bool) -> None:
        """Look at the loads. If idle, save pages that sequences have left."""
        ...

    def take_moves(self) -> PageMoves:
        """Return the plan's orders for pages beside the pool."""
        ...

    def applied(
        self, flight: InFlightPlan, result: StepResult, later: Iterable[InFlightPlan]
    ) -> None:
        """Apply a plan's result. The plan was carried out before those in `later`."""
        ...

    def flush(self, disk: bool) -> None:
        """End every load, and forget what is kept. The disk is cleared only with `disk`."""
        ...

    def measure(self, metrics: Metrics, counts: Counts) -> None:
        """Copy counts and levels into the metrics that users see."""
        ...
