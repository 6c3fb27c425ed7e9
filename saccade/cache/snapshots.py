"""Snapshots of per-sequence states: the lines of the workers' state memory in use, and the next to
go. Owns line numbers. Knows nothing of tensors, nor of a holder's nature.

take -> (a plan saves a slot's state in the line) -> attach -> touch ... -> detach, or loss to
another taker. A line between take and attach belongs to its taker, who may release it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


class Snapshots(Generic[H]):
    """`count` lines from `first` on. evictions: snapshots that went to make room."""

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self.evictions = 0
        self._all = range(first, first + count)
        self._free = list(self._all)[::-1]
        self._held: dict[H, int] = {}  # the least recently used first

    def __len__(self) -> int:
        """Snapshots that somebody holds."""
        return len(self._held)

    def take(self, first: Callable[[H], bool]) -> tuple[int | None, H | None]:
        """A line for writing: a free line, or that of the least recently used holder, the holders
        for which `first` is true before all others. Returns (line, the holder that lost it); (None,
        None) if no line can be had.
        """
        if self._free:
            return self._free.pop(), None
        holder = next(filter(first, self._held), next(iter(self._held), None))
        if holder is None:
            return None, None
        self.evictions += 1
        return self._held.pop(holder), holder

    def release(self, line: int) -> None:
        """A line that was taken is not needed."""
        self._free.append(line)

    def attach(self, holder: H, line: int) -> None:
        """The line holds the holder's snapshot, or will when a plan in flight has been carried
        out, before any that is made from now on.
        """
        assert holder not in self._held
        self._held[holder] = line

    def touch(self, holder: H) -> None:
        """Mark a holder's snapshot as just used."""
        self._held[holder] = self._held.pop(holder)

    def detach(self, holder: H) -> None:
        """Free a holder's snapshot with the holder."""
        self.release(self._held.pop(holder))

    def audit(self, taken: Iterable[int]) -> None:
        """Assert that every line is exactly one of free, held, or in `taken`."""
        lines = [*self._free, *self._held.values(), *taken]
        assert sorted(lines) == list(self._all), "a line is lost, or has two owners"
