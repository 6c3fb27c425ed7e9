"""Slots of running sequences: free, taken, or to be closed by the next plan."""

from __future__ import annotations

from saccade.sched.draft_states import DraftStates
from saccade.sched.sequence import Run


class RunSlots:
    """Slots of running sequences. A returned slot is free at once: workers close before
    they open. states: those kept beside the slots' own.
    """

    def __init__(self, count: int, states: DraftStates) -> None:
        self._free = list(range(count))[::-1]
        self.states = states
        self.closing: list[int] = []

    def __len__(self) -> int:
        """Free slots."""
        return len(self._free)

    def take(self) -> int:
        """A free slot."""
        return self._free.pop()

    def give_back(self, run: Run) -> None:
        """The sequence has left its slot."""
        self.states.left(run)
        self._free.append(run.slot)
        self.closing.append(run.slot)

    def take_closing(self) -> list[int]:
        """Slots for a plan to close, each once."""
        closing, self.closing = self.closing, []
        return closing
