"""Snapshots of per-sequence states: which slots of the workers' state memory are in use, and which
is evicted next.

Owns line numbers.

take -> (a plan saves a slot's state in the line) -> attach -> touch ... -> detach, or loss to
another taker. A line between take and attach belongs to its taker, who may release it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


class Snapshots(Generic[H]):
    """`count` lines from `first` on. evictions: snapshots evicted for new ones."""

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self.evictions = 0
        self._all = range(first, first + count)
        self._free = list(self._all)[::-1]
        self._held: dict[H, int] = {}  # the least recently used first
        self._unused: dict[H, int] = {}  # those of idle work until somebody uses them

    def __len__(self) -> int:
        """Return how many snapshots have a holder."""
        return len(self._held) + len(self._unused)

    def allocate_slot(self, first: Callable[[H], bool]) -> tuple[int | None, H | None]:
        """Return (line to write, holder that lost it), or (None, None) if every line is taken.

        A free slot is taken first, then those of idle work, then the least recently used
        holder's; holders for which `first` is true come before all others.
        """
        if self._free:
            return self._free.pop(), None
        lines = self._unused or self._held
        holder = next(filter(first, lines), next(iter(lines), None))
        if holder is None:
            return None, None
        self.evictions += 1
        return lines.pop(holder), holder

    def release(self, line: int) -> None:
        """Free a line that was taken but is unneeded."""
        self._free.append(line)

    def attach(self, holder: H, line: int, *, idle: bool = False) -> None:
        """Give `line` to a holder as its snapshot. `idle`: it is evicted first until it is used.

        The line holds the snapshot now, or will once a plan in flight has been carried out. That
        happens before any plan made from now on.
        """
        assert holder not in self._held and holder not in self._unused
        (self._unused if idle else self._held)[holder] = line

    def touch(self, holder: H) -> None:
        """Mark a holder's snapshot as just used."""
        self._held[holder] = self._pop(holder)

    def detach(self, holder: H) -> None:
        """Free a holder's snapshot with the holder."""
        self.release(self._pop(holder))

    def _pop(self, holder: H) -> int:
        return (self._held if holder in self._held else self._unused).pop(holder)

    def audit(self, taken: Iterable[int]) -> None:
        """Assert that every line is exactly one of free, held, or in `taken`."""
        lines = [*self._free, *self._held.values(), *self._unused.values(), *taken]
        assert sorted(lines) == list(self._all), "a line is lost, or has two owners"
