"""When a sequence's state is saved, for models with states, and how long the snapshot lives.

Owns which line is whose run's. The lines are the prefix cache's. Decides where chunks end for a
snapshot's sake: at the last page boundary in each image, before each breakpoint, before the place
where the next prompt will branch off, and before the prompt's end. Long prompts have more such
places, at equal distances. For an answer only the newest snapshot is kept, until the answer ends.

A plan loads states before its rows and saves them after, and plans are carried out in order. So a
line may be given to another snapshot while a plan in flight writes or reads it.
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
"""Between two snapshots of an answer, about."""


@dataclass(frozen=True, slots=True)
class Save:
    """A snapshot: the state after `tokens` tokens is in `line`, or on its way."""

    tokens: int
    line: int


@dataclass(slots=True)
class RunStates:
    """Snapshots from one stay in a slot."""

    points: tuple[int, ...]  # places in the prompt
    planned: list[Save] = field(default_factory=list)  # by plans in flight, in order
    newest: Save | None = None  # the answer's latest
    # taken, but a duplicate hides their page until the run ends
    hidden: list[Save] = field(default_factory=list)

    @property
    def lines(self) -> list[int]:
        """The lines that the cache has yet to hold."""
        newest = [self.newest] if self.newest else []
        return [save.line for save in (*self.planned, *newest, *self.hidden)]


def build_snapshots(config: EngineConfig, _: FamilySpec) -> Snapshots[Node]:
    """Build the book of the lines behind the slots' own."""
    return Snapshots(config.max_running, config.snapshots.count)


class SnapshotScheduler(StepPart):
    """Snapshots for all sequences."""

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
        """Return where a prompt's chunks end, in order, at whole pages.

        Every prompt has too few points to take most of the snapshots.
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
        """Return a waiting sequence's first snapshot point after its found prefix."""
        points = self.points(sequence.request)
        index = bisect_right(points, sequence.position)
        return points[index] if index < len(points) else None

    def admitted(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:
        """Continue from the state after the last cached page."""
        self._runs[run] = RunStates(self.points(sequence.request))
        if run.pages:
            assert run.node is not None
            line = run.node.snapshot
            assert line is not None, "a path ends where a snapshot was taken"
            builder.restore.append(StateCopy(line, run.slot))

    def cut(self, run: Run, end: int) -> int:
        """Return where the state can be saved, up to `end`, or else `end`."""
        states = self._runs[run]
        index = bisect_right(states.points, run.planned)
        if index < len(states.points):
            return min(end, states.points[index])
        whole = end // self._answer * self._answer
        return whole if whole > run.planned else end

    def limit_drafts(self, run: Run, most: int) -> int:
        """Count those of `most` draft tokens after the next row that precede the next save.

        Only the state after a certain token is saved.
        """
        return min(most, self._answer - 1 - (run.planned + 1) % self._answer)

    def limit_steps(self, run: Run, most: int) -> int:
        """End a plan before the step after which the next snapshot is due.

        A plan's first step may have one.
        """
        return min(most, self._answer - (run.planned + 1) % self._answer)

    def planned(self, run: Run, row: Row, builder: PlanBuilder) -> None:
        """Save the state after the row at a snapshot point.

        With draft tokens behind the row, the slot has another state by then. The row's state is
        kept for them.
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
        """Free the lines of states that were not reached."""
        states = self._runs[run]
        while states.planned and states.planned[-1].tokens > run.planned:
            self._snapshots.release(states.planned.pop().line)

    def computed(self, sequence: Sequence, run: Run, before: int) -> None:  # noqa: ARG002
        """Attach the snapshots of findable pages, but those that a duplicate hides."""
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
        """Attach what was saved for computed tokens, and free the rest."""
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
        """Return the lines of `runs`."""
        assert self._runs.keys() == set(runs), "a run's snapshots are lost"
        return [line for states in self._runs.values() for line in states.lines]

    def _attach(self, node: Node, sequence: Sequence, save: Save) -> bool:
        depth = save.tokens // self._size
        idle = sequence.idle
        return self._prefix.attach(node, sequence.content, depth, save.line, idle=idle)

    def _floor(self, tokens: int) -> int:
        return tokens // self._size * self._size
