"""Allocates the slots for snapshots of recurrent states in the workers' memory, and selects which
snapshot is evicted next. This module manages only slot indices. The workers have the states.

    allocate_slot -> (a plan copies a sequence's state to the slot) -> attach -> touch ... -> detach

Between `allocate_slot` and `attach`, a slot belongs to the caller, who may `release` it. After
`attach`, a later `allocate_slot` may evict the snapshot instead of `detach`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


class Snapshots(Generic[H]):
    """Manages `count` slots, numbered from `first`.

    Each snapshot belongs to a holder, such as a node of the prefix cache.
    """

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self.evictions = 0  # snapshots evicted for new ones
        self._all = range(first, first + count)
        self._free = list(self._all)[::-1]
        self._held: dict[H, int] = {}  # holder -> slot, the least recently used first
        self._unused: dict[H, int] = {}  # those that only background requests have used

    def __len__(self) -> int:
        """Return the number of snapshots that have a holder."""
        return len(self._held) + len(self._unused)

    def allocate_slot(self, first: Callable[[H], bool]) -> tuple[int | None, H | None]:
        """Return the slot to write, and the holder whose snapshot was evicted to free it.

        The holder is None for a free slot. Both are None if no slot is available. A free slot is
        used first, then the slot of a snapshot that only background requests have used, then the
        slot of the least recently used snapshot.

        first: returns True for holders that lose their snapshots before others.
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
        """Free a slot that was allocated but is not needed."""
        self._free.append(line)

    def attach(self, holder: H, line: int, *, idle: bool = False) -> None:
        """Make the content of slot `line` the snapshot of a holder.

        The workers have written the slot, or will before they execute any plan made from now on.

        idle: True to evict it first, until it is used.
        """
        assert holder not in self._held and holder not in self._unused
        (self._unused if idle else self._held)[holder] = line

    def touch(self, holder: H) -> None:
        """Record a use of the holder's snapshot, which is now evicted later than others."""
        self._held[holder] = self._pop(holder)

    def detach(self, holder: H) -> None:
        """Remove the snapshot of a holder, and free its slot."""
        self.release(self._pop(holder))

    def _pop(self, holder: H) -> int:
        return (self._held if holder in self._held else self._unused).pop(holder)

    def audit(self, taken: Iterable[int]) -> None:
        """Assert that every slot is exactly one of free, attached, or in `taken`."""
        lines = [*self._free, *self._held.values(), *self._unused.values(), *taken]
        assert sorted(lines) == list(self._all), "a line is lost, or has two owners"
