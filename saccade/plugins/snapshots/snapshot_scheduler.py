"""Decides when a sequence's state is saved, for models with states, and how long the snapshot is
stored.

This module assigns slots of the prefix cache to runs of sequences. Chunks end where a snapshot is
taken: at the last page boundary in each image, before each breakpoint, before the point where the
next prompt is expected to branch off, and before the prompt's end. Long prompts have more of these
points, at equal distances. While an answer is generated, only its latest snapshot is stored.

A plan loads states before its rows and saves them after its rows, and plans are executed in order.
So a slot can be assigned to another snapshot while a plan in flight reads or writes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from saccade.cache.prefix import Node
from saccade.cache.snapshots import Snapshots
from saccade.core.config import EngineConfig
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.plan import NO_LINE, Row, StateCopy
from saccade.core.types import FinishReason, Request
from saccade.sched.builder import PlanBuilder
from saccade.sched.parts.step_part import PartContext, StepPart
from saccade.sched.sequence import Run, Sequence

ANSWER_TOKENS = 32
"""The approximate number of tokens between two snapshots of an answer."""


@dataclass(frozen=True, slots=True)
class Save:
    """A snapshot: the state after `tokens` tokens is, or will be, in slot `line`."""

    tokens: int
    line: int


@dataclass(slots=True)
class RunStates:
    """The slots of the snapshots of one run of a sequence."""

    points: tuple[int, ...]  # the snapshot points in the prompt, in tokens
    planned: list[Save] = field(default_factory=list)  # those of plans in flight, in order
    newest: Save | None = None  # the latest of the answer
    # those that cannot be attached until the run ends, because a duplicate page hides theirs
    hidden: list[Save] = field(default_factory=list)

    @property
    def lines(self) -> list[int]:
        """The slots of snapshots that have not been attached to pages of the prefix cache."""
        newest = [self.newest] if self.newest else []
        return [save.line for save in (*self.planned, *newest, *self.hidden)]


def build_snapshots(config: EngineConfig, _: FamilySpec) -> Snapshots[Node]:
    """Create the table of slots for snapshots. Their number depends on the maximum number of
    running sequences.
    """
    return Snapshots(config.max_running, config.snapshots.count)


class SnapshotScheduler(StepPart):
    """Takes and restores the snapshots of all sequences."""

    def __init__(self, context: PartContext) -> None:
        prefix, page_size = context.prefix, context.pool.page_size
        assert prefix is not None and prefix.snapshots is not None
        self._prefix = prefix
        self._snapshots = prefix.snapshots
        self._size = page_size
        self._every = max(1, context.limits.snapshot_tokens // page_size) * page_size
        self._answer = max(1, ANSWER_TOKENS // page_size) * page_size
        self._most = max(2, self._snapshots.count // 4)
        self._runs: dict[Run, RunStates] = {}

    def points(self, request: Request) -> tuple[int, ...]:
        """Return the token indices at which a prompt's chunks end for snapshots, ascending, at page
        boundaries.

        The number of points is limited, so that no prompt can take most of the slots.
        """
        size, last = self._size, self._floor(len(request.tokens) - 1)
        ends = {request.images[span.image].key: span.end for span in request.spans}
        places = {self._floor(end) for end in ends.values()} | {
            *range(self._every, last, self._every)
        }
        ends_early = sorted(place for place in places if 0 < place < last)
        step = -(-len(ends_early) // self._most) if ends_early else 1
        caching = request.caching
        named = {self._floor(tokens) for tokens, _ in caching.breakpoints}
        named.add(self._floor(caching.branch))
        kept = {*ends_early[::-1][::step], *named, last}
        return tuple(sorted(place for place in kept if size <= place <= last))

    def first_shared(self, sequence: Sequence) -> int | None:
        """Return the first snapshot point of a waiting sequence after its cached prefix, or
        None.
        """
        points = self.points(sequence.request)
        index = bisect_right(points, sequence.position)
        return points[index] if index < len(points) else None

    def admitted(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:
        """Start the run with the snapshot of the last cached page."""
        self._runs[run] = RunStates(self.points(sequence.request))
        if run.pages:
            assert run.node is not None
            line = run.node.snapshot
            assert line is not None, "a path ends where a snapshot was taken"
            builder.restore.append(StateCopy(line, run.slot))

    def cut(self, run: Run, end: int) -> int:
        """Return the next point before `end` where the state should be saved, or else `end`."""
        states = self._runs[run]
        index = bisect_right(states.points, run.planned)
        if index < len(states.points):
            return min(end, states.points[index])
        whole = end // self._answer * self._answer
        return whole if whole > run.planned else end

    def limit_drafts(self, run: Run, most: int) -> int:
        """Return how many of `most` draft tokens can be tried before the next snapshot.

        They may not include the token after which the state has to be saved.
        """
        return min(most, self._answer - 1 - (run.planned + 1) % self._answer)

    def limit_steps(self, sequence: Sequence, run: Run, rows: int, most: int) -> int:  # noqa: ARG002
        """Return how many steps a plan may have, so that it ends before the step after the next
        snapshot.

        The first step of a plan may take a snapshot.
        """
        return min(most, self._answer - (run.planned + 1) % self._answer)

    def planned(self, run: Run, row: Row, builder: PlanBuilder) -> None:
        """Save the state after the row, if it ends at a snapshot point.

        If draft tokens follow the row, the slot has a later state when the plan ends, so the copy
        kept for the draft tokens is saved instead.
        """
        states, end = self._runs[run], row.start + row.length
        last = states.points[-1] if states.points else 0
        if end not in states.points if end <= last else end % self._answer:
            return
        line = self._prefix.allocate_slot()
        if line is not None:
            source = run.slot if row.keep == NO_LINE else row.keep
            builder.snapshot.append(StateCopy(source, line))
            states.planned.append(Save(end, line))

    def skipped(self, run: Run) -> None:
        """Release the slots of states that were not reached."""
        states = self._runs[run]
        while states.planned and states.planned[-1].tokens > run.planned:
            self._snapshots.release(states.planned.pop().line)

    def computed(self, sequence: Sequence, run: Run, before: int) -> None:  # noqa: ARG002
        """Attach snapshots to pages that are now cached, except for those hidden by a duplicate."""
        states = self._runs[run]
        assert run.node is not None
        while states.planned and states.planned[0].tokens <= run.computed:
            save = states.planned.pop(0)
            if states.points and save.tokens <= states.points[-1]:
                if not self._attach(run.node, sequence, save):
                    states.hidden.append(save)
                continue
            if states.newest:
                self._snapshots.release(states.newest.line)
            states.newest = save

    def left(self, sequence: Sequence, run: Run, reason: FinishReason | None) -> None:  # noqa: ARG002
        """Attach the snapshots of computed tokens, and release the other slots."""
        states, node = self._runs.pop(run), run.node
        assert node is not None
        for save in states.planned:
            self._snapshots.release(save.line)
        for save in (*states.hidden, *([states.newest] if states.newest else ())):
            attached = self._attach(node, sequence, save)
            assert attached, "whatever was computed is cached now"

    def measure(self, metrics: Metrics) -> None:
        metrics.set("saccade_snapshots", len(self._snapshots))
        metrics.set("saccade_snapshot_evictions_total", self._snapshots.evictions)

    def audit(self, runs: Iterable[Run]) -> Iterable[int]:
        """Return the slots of `runs`."""
        assert self._runs.keys() == set(runs), "a run's snapshots are lost"
        return [line for states in self._runs.values() for line in states.lines]

    def _attach(self, node: Node, sequence: Sequence, save: Save) -> bool:
        depth = save.tokens // self._size
        idle = sequence.idle
        return self._prefix.attach(node, sequence.content, depth, save.line, idle=idle)

    def _floor(self, tokens: int) -> int:
        return tokens // self._size * self._size
