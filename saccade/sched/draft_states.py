"""The states between guesses, for models with states: lines of the workers' state memory.

Owns these lines. Of a row and the guesses behind it, the last leaves its state in the slot; the
states after the others are kept, a line each. Once they are drawn, the sequence goes on from the
state after the last right guess: its next plan copies that line to the slot, before any row; where
all were right, the slot has it. Plans are carried out in order, so a line is free as soon as the
plan that reads it is made, or nobody wants to.
"""

from __future__ import annotations

from collections.abc import Iterable

from saccade.core.plan import StateCopy
from saccade.sched.builder import PlanBuilder
from saccade.sched.sequence import Run


class DraftStates:
    """lines: None for a model without states."""

    def __init__(self, lines: range | None) -> None:
        self._lines = lines
        self._free = list(lines or ())

    def room(self, run: Run, most: int) -> int:
        """The number of guesses, up to `most`, whose states can be kept."""
        if self._lines is None:
            return most
        return min(most, len(self._free) + len(run.speculation.lines))

    def planned(self, run: Run, builder: PlanBuilder, guesses: int = 0) -> None:
        """Before the run's next row, with so many guesses behind it: `Speculation.lines` are those
        for the states after the row and after each guess but the last.
        """
        speculation = run.speculation
        builder.restore += [StateCopy(line, run.slot) for line in speculation.lines]
        self.left(run)
        if self._lines is not None:
            speculation.lines = [self._free.pop() for _ in range(guesses)]

    def settled(self, run: Run, right: int) -> None:
        """So many guesses of the run were right: `Speculation.lines` has the state to go on from,
        unless all were.
        """
        lines = run.speculation.lines
        self._free += lines[:right] + lines[right + 1 :]
        run.speculation.lines = lines[right : right + 1]

    def left(self, run: Run) -> None:
        """The run needs no state kept so far."""
        self._free += run.speculation.lines
        run.speculation.lines = []

    def audit(self, runs: Iterable[Run]) -> None:
        """Assert that every line is free, or one of `runs`'."""
        taken = [line for run in runs for line in run.speculation.lines]
        assert sorted((*self._free, *taken)) == list(self._lines or ()), "a line is lost"
