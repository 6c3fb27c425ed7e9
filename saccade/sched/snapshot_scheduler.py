"""The times at which a sequence's state is saved, for models with states, and the life of the
snapshot.

Owns no line: the prefix cache does. Decides where chunks end for a snapshot's sake: at the last
page boundary in each image, before each breakpoint, before the end of the prompt, and every so many
tokens of long prompts. Of an answer only the newest snapshot is kept, until the answer ends.

A plan loads states before its rows and saves them after; plans are carried out in order. So a line
may be given to another snapshot while a plan in flight writes or reads it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Protocol

from saccade.cache.prefix import Node, PrefixCache
from saccade.core.plan import StateCopy
from saccade.core.types import Request
from saccade.sched.builder import PlanBuilder
from saccade.sched.sequence import Run, RunStates, Save, Sequence

ANSWER_TOKENS = 32
"""Between two snapshots of an answer, about."""


class SnapshotKeeper(Protocol):
    """Hears of every step in a run's life, and saves the state when worthwhile."""

    def first_point(self, sequence: Sequence) -> int | None:
        """The first snapshot point of a waiting sequence after its found prefix: nothing can be
        shared before; None: all can be shared.
        """
        ...

    def admitted(
        self, sequence: Sequence, run: Run, path: list[Node], builder: PlanBuilder
    ) -> None:
        """A sequence goes on from the last page of `path`."""
        ...

    def cut(self, run: Run, end: int) -> int:
        """The end of a chunk that could go to `end`, moved so that the state can be saved."""
        ...

    def foreseen(self, run: Run, most: int) -> int:
        """Of up to `most` guesses behind the next row, those before the state is saved again."""
        ...

    def planned(self, run: Run, builder: PlanBuilder) -> None:
        """A row was planned, and its guesses up to `run.planned`."""
        ...

    def published(self, sequence: Sequence, run: Run) -> None:
        """The pages of a running sequence are findable up to `run.computed`, unless hidden."""
        ...

    def left(self, sequence: Sequence, run: Run, node: Node) -> None:
        """A run has ended; `node` is the last whole page."""
        ...

    def audit(self, runs: Iterable[Run], arriving: Iterable[int] = ()) -> None:
        """Assert that every line is free, the prefix cache's, one of `runs`', or one of
        `arriving`.
        """
        ...


def keep_snapshots(prefix: PrefixCache | None, page_size: int, every: int) -> SnapshotKeeper:
    """The keeper for a model with the given prefix cache; `every` as in `SnapshotScheduler`."""
    if prefix is None or prefix.snapshots is None:
        return NoSnapshots()
    return SnapshotScheduler(prefix, page_size, every)


class NoSnapshots:
    """A model without states: a sequence leaves pages alone, and chunks end anywhere."""

    def first_point(self, sequence: Sequence) -> None:
        """Everything can be shared."""

    def admitted(
        self, sequence: Sequence, run: Run, path: list[Node], builder: PlanBuilder
    ) -> None:
        """Nothing is restored."""

    def cut(self, run: Run, end: int) -> int:  # noqa: ARG002
        """Nowhere earlier."""
        return end

    def foreseen(self, run: Run, most: int) -> int:  # noqa: ARG002
        """All of them."""
        return most

    def planned(self, run: Run, builder: PlanBuilder) -> None:
        """Nothing is saved."""

    def published(self, sequence: Sequence, run: Run) -> None:
        """Nothing was saved."""

    def left(self, sequence: Sequence, run: Run, node: Node) -> None:
        """Nothing was saved."""

    def audit(self, runs: Iterable[Run], arriving: Iterable[int] = ()) -> None:
        """Assert nothing: no line exists."""


class SnapshotScheduler:
    """Snapshots of all sequences. every: tokens between two of a long prompt."""

    def __init__(self, prefix: PrefixCache, page_size: int, every: int) -> None:
        assert prefix.snapshots is not None
        self._prefix = prefix
        self._snapshots = prefix.snapshots
        self._size = page_size
        self._every = max(1, every // page_size) * page_size
        self._answer = max(1, ANSWER_TOKENS // page_size) * page_size
        self._most = max(2, self._snapshots.count // 4)

    def points(self, request: Request) -> tuple[int, ...]:
        """The ends of a prompt's chunks, in order: whole pages. No prompt has enough points to take
        most of the snapshots.
        """
        size, last = self._size, self._floor(len(request.tokens) - 1)
        ends = {request.images[span.image].key: span.end for span in request.spans}
        places = {self._floor(end) for end in ends.values()} | {
            *range(self._every, last, self._every)
        }
        ends_early = sorted(place for place in places if 0 < place < last)
        step = -(-len(ends_early) // self._most) if ends_early else 1
        named = {self._floor(tokens) for tokens, _ in request.caching.breakpoints}
        kept = {*ends_early[::-1][::step], *named, last}
        return tuple(sorted(place for place in kept if size <= place <= last))

    def first_point(self, sequence: Sequence) -> int | None:
        """The first snapshot point of a waiting sequence after its found prefix."""
        points = self.points(sequence.request)
        index = bisect_right(points, sequence.position)
        return points[index] if index < len(points) else None

    def admitted(
        self, sequence: Sequence, run: Run, path: list[Node], builder: PlanBuilder
    ) -> None:
        """A sequence goes on from the last page of `path`."""
        run.states = RunStates(self.points(sequence.request))
        if path:
            line = path[-1].snapshot
            assert line is not None, "a path ends where a snapshot was taken"
            builder.restore.append(StateCopy(line, run.slot))

    def cut(self, run: Run, end: int) -> int:
        """The end of a chunk that could go to `end`, moved so that the state can be saved."""
        states = run.states
        assert states is not None
        index = bisect_right(states.points, run.planned)
        if index < len(states.points):
            return min(end, states.points[index])
        whole = end // self._answer * self._answer
        return whole if whole > run.planned else end

    def foreseen(self, run: Run, most: int) -> int:
        """Of up to `most` guesses behind the next row, those before the state is saved again: only
        that of a certain token is.
        """
        return min(most, self._answer - 1 - (run.planned + 1) % self._answer)

    def planned(self, run: Run, builder: PlanBuilder) -> None:
        """A row was planned, and its guesses up to `run.planned`: save the state after the row at a
        snapshot point.
        """
        states, end = run.states, run.planned - run.speculation.rows
        assert states is not None
        last = states.points[-1] if states.points else 0
        if end not in states.points if end <= last else end % self._answer:
            return
        line = self._prefix.take_line()
        if line is not None:
            source = [*run.speculation.lines, run.slot][0]
            builder.snapshot.append(StateCopy(source, line))
            states.planned.append(Save(end, line))

    def published(self, sequence: Sequence, run: Run) -> None:
        """The pages of a running sequence are findable up to `run.computed`, unless hidden."""
        states = run.states
        assert states is not None and run.node is not None
        while states.planned and states.planned[0].tokens <= run.computed:
            save = states.planned.pop(0)
            if states.points and save.tokens <= states.points[-1]:
                if not self._attach(run.node, sequence, save):
                    states.hidden.append(save)
                continue
            if states.newest:
                self._snapshots.release(states.newest.line)
            states.newest = save

    def left(self, sequence: Sequence, run: Run, node: Node) -> None:
        """A run has ended; `node` is the last whole page."""
        states, run.states = run.states, None
        assert states is not None
        for save in states.planned:
            self._snapshots.release(save.line)
        for save in (*states.hidden, *([states.newest] if states.newest else ())):
            attached = self._attach(node, sequence, save)
            assert attached, "whatever was computed is cached now"

    def audit(self, runs: Iterable[Run], arriving: Iterable[int] = ()) -> None:
        """Assert that every line is free, the prefix cache's, one of `runs`', or one of
        `arriving`.
        """
        lines = (line for run in runs if run.states for line in run.states.lines)
        self._snapshots.audit((*lines, *arriving))

    def _attach(self, node: Node, sequence: Sequence, save: Save) -> bool:
        depth = save.tokens // self._size
        return self._prefix.attach(node, sequence.content, depth, save.line)

    def _floor(self, tokens: int) -> int:
        return tokens // self._size * self._size
