"""Slots of running sequences: free, taken, or to be closed by the next plan."""

from __future__ import annotations


class RunSlots:
    """Slots of running sequences. A returned slot is free at once: workers close before
    they open.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]
        self.closing: list[int] = []

    def __len__(self) -> int:
        """Free slots."""
        return len(self._free)

    def take(self) -> int:
        """A free slot."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """The sequence has left its slot."""
        self._free.append(slot)
        self.closing.append(slot)

    def take_closing(self) -> list[int]:
        """Slots for a plan to close, each once."""
        closing, self.closing = self.closing, []
        return closing
