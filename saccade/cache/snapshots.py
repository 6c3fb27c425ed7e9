"""Snapshots of the states that a model keeps per sequence: which lines of the workers' state memory
hold one, and which goes next. Owns line numbers. Knows nothing of tensors, nor of what a holder is.

take -> (a plan saves a slot's state there) -> attach -> touch ... -> detach, or taken from its
holder. A line that is taken and not attached yet is whoever's took it, who may release it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


class Snapshots(Generic[H]):
    """`count` lines from `first` on. evictions: snapshots that went for others' sake."""

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
        """A line to be written: a free one, or that of the least recently used holder, those of
        which `first` holds before all others. (line, who has lost it); (None, None) where none can
        be had.
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
        """It was of use."""
        self._held[holder] = self._held.pop(holder)

    def detach(self, holder: H) -> None:
        """The holder goes, and its snapshot with it."""
        self.release(self._held.pop(holder))

    def audit(self, taken: Iterable[int]) -> None:
        """Assert that every line is free, held, or one of `taken`, and only one of these."""
        lines = [*self._free, *self._held.values(), *taken]
        assert sorted(lines) == list(self._all), "a line is lost, or has two owners"
