"""Whose turn it is: the waiting sequences in the order in which they may be admitted.

Owns the order of turns between clients, and within a client between groups (one HTTP request with
`n` answers is a group). Knows nothing of slots, pages or images.

A client that was served, and one that begins to wait, goes to the end of the line; so does a group
within its client. So between two turns of a client that waits, every other client has one turn at
most. Sequences that lost their pages to older ones come before all others: they have had their
turn.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain

from saccade.sched.sequence import Sequence

Groups = dict[str, list[Sequence]]
"""Sequences by group, the group that is served next first; each group's by order of arrival."""

GROUP_SHARE = 2
"""While another group of its client waits for a first slot, a group keeps one slot in so many."""


class TurnQueue:
    """Waiting sequences; iterating gives them in turn order."""

    def __init__(self) -> None:
        self._clients: dict[str, Groups] = {}  # the client that is served next first
        self._returned: list[Sequence] = []  # by order
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """In turn order as it is now; sequences may be taken out meanwhile."""
        lanes = (_round_robin(map(_members, tuple(g.values()))) for g in self._clients.values())
        return chain(tuple(self._returned), _round_robin(tuple(lanes)))

    @property
    def clients(self) -> Iterable[str]:
        """Clients that wait."""
        return self._clients.keys() | {sequence.client for sequence in self._returned}

    def add(self, sequence: Sequence) -> None:
        """A sequence begins to wait for its turn."""
        group = self._clients.setdefault(sequence.client, {}).setdefault(sequence.group, [])
        insort(group, sequence, key=lambda s: s.order)
        self._length += 1

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that had its turn has lost its pages to an older one."""
        insort(self._returned, sequence, key=lambda s: s.order)
        self._length += 1

    def remove(self, sequence: Sequence, served: bool) -> None:
        """Take a sequence out. `served`: it is admitted; the others of its group and of its client
        have their next turn after those who wait.
        """
        self._length -= 1
        if sequence in self._returned:
            self._returned.remove(sequence)
            return
        groups = self._clients[sequence.client]
        groups[sequence.group].remove(sequence)
        group = groups.pop(sequence.group) if served else groups[sequence.group]
        if group:
            groups[sequence.group] = group
        else:
            groups.pop(sequence.group, None)
        if served or not groups:
            del self._clients[sequence.client]
        if groups:
            self._clients[sequence.client] = groups


def _members(group: list[Sequence]) -> Iterator[Sequence]:
    yield from tuple(group)


def _round_robin(lanes: Iterable[Iterator[Sequence]]) -> Iterator[Sequence]:
    turns = deque(lanes)
    while turns:
        lane = turns.popleft()
        sequence = next(lane, None)
        if sequence is not None:
            turns.append(lane)
            yield sequence


def crowding(
    newcomer: Sequence, running: Iterable[Sequence], waiting: Iterable[str], slots: int
) -> Sequence | None:
    """The running sequence that gives its slot to `newcomer`, whose client or group has none: the
    youngest of the client that holds more than its share, or of the group that does. None: nobody
    does.

    `waiting`: clients that wait. A client's share is its part of all slots.
    """
    held = Counter(sequence.client for sequence in running)
    if held[newcomer.client]:
        rivals = [sequence for sequence in running if sequence.client == newcomer.client]
        groups = Counter(sequence.group for sequence in rivals)
        share = max(1, slots // GROUP_SHARE)
        return None if groups[newcomer.group] else _youngest_of_largest_group(rivals, share)
    share = max(1, slots // len(held.keys() | set(waiting)))
    client = max(held, key=lambda name: held[name])
    if held[client] <= share:
        return None
    return _youngest_of_largest_group([s for s in running if s.client == client], 0)


def _youngest_of_largest_group(rivals: list[Sequence], share: int) -> Sequence | None:
    groups = Counter(sequence.group for sequence in rivals)
    most = max(groups.values())
    if most <= share:
        return None
    largest = [sequence for sequence in rivals if groups[sequence.group] == most]
    return max(largest, key=lambda sequence: sequence.order)
