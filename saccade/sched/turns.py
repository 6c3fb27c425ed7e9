"""The order in which waiting sequences may be admitted, and those that nobody waits for.

Owns the order of turns between clients, and within a client between groups (one HTTP request with
`n` answers is a group), lower `priority` first.

A client moves to the end of the queue after being served, and when it starts to wait. So does a
group within its client. So between two turns of a waiting client, every other client has one turn
at most. Preempted sequences are first, having had their turn.

Turns alone would leave all slots with the first to arrive. So holders of their full share follow
the rest, and a client without a slot gets one from a client beyond its share. A client's share is
the slots divided by the number of clients, and a group's is half the slots.
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
"""While another group of its client waits, a group has one slot in so many."""


class TurnQueue:
    """Waiting sequences, iterated in turn order."""

    def __init__(self) -> None:
        self._clients: dict[str, Groups] = {}  # the client that is served next first
        self._returned: list[Sequence] = []  # by order
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yield sequences in the present turn order. Sequences may be removed meanwhile."""
        queues = (_in_order(tuple(groups.values())) for groups in self._clients.values())
        return chain(tuple(self._returned), _round_robin(tuple(queues)))

    @property
    def clients(self) -> Iterable[str]:
        """Clients with waiting sequences."""
        return self._clients.keys() | {sequence.client for sequence in self._returned}

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        group = self._clients.setdefault(sequence.client, {}).setdefault(sequence.group, [])
        insort(group, sequence, key=lambda s: s.order)
        self._length += 1

    def put_back(self, sequence: Sequence) -> None:
        """Queue first a sequence that had its turn and lost its pages to an older one."""
        insort(self._returned, sequence, key=lambda s: s.order)
        self._length += 1

    def remove(self, sequence: Sequence, served: bool) -> None:
        """Remove a sequence.

        `served`: the sequence is admitted. The rest of its group and client have their next turn
        after all waiting ones.
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


def _in_order(groups: tuple[list[Sequence], ...]) -> Iterator[Sequence]:
    """Yield one client's groups in turns, in order of priority."""
    by_priority: dict[int, list[list[Sequence]]] = {}
    for group in groups:
        by_priority.setdefault(group[0].request.priority, []).append(group)
    for priority in sorted(by_priority):
        yield from _round_robin(map(_members, tuple(by_priority[priority])))


def _members(group: list[Sequence]) -> Iterator[Sequence]:
    yield from tuple(group)


def _round_robin(queues: Iterable[Iterator[Sequence]]) -> Iterator[Sequence]:
    turns = deque(queues)
    while turns:
        queue = turns.popleft()
        sequence = next(queue, None)
        if sequence is not None:
            turns.append(queue)
            yield sequence


def in_turn(queue: TurnQueue, running: Iterable[Sequence], slots: int) -> Iterator[Sequence]:
    """Yield the queue in turn order.

    Sequences whose client or group holds its share of the slots are last.
    """
    clients, groups = _held(running)
    client_share = _client_share(clients, queue, slots)
    later: list[Sequence] = []
    for sequence in queue:
        if clients[sequence.client] < client_share and groups[
            sequence.client, sequence.group
        ] < _group_share(slots):
            yield sequence
        else:
            later.append(sequence)
    yield from later


def find_crowding(
    newcomer: Sequence, queue: TurnQueue, running: Iterable[Sequence], slots: int
) -> Sequence | None:
    """Return the running sequence to give its slot to `newcomer`, whose client or group lacks
    slots.

    It is the youngest of a client or group beyond its share. Returns None if all keep within
    theirs.
    """
    clients, groups = _held(running)
    if clients[newcomer.client]:
        if groups[newcomer.client, newcomer.group]:
            return None
        client, share = newcomer.client, _group_share(slots)
    else:
        client = max(clients, key=lambda name: clients[name])
        if clients[client] <= _client_share(clients, queue, slots):
            return None
        share = 0
    most = max(count for (name, _), count in groups.items() if name == client)
    if most <= share:
        return None
    rivals = (s for s in running if s.client == client and groups[client, s.group] == most)
    return max(rivals, key=lambda sequence: sequence.order)


def _held(running: Iterable[Sequence]) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Count slots by client, and by client and group."""
    clients = Counter(sequence.client for sequence in running)
    return clients, Counter((sequence.client, sequence.group) for sequence in running)


def _client_share(held: Counter[str], queue: TurnQueue, slots: int) -> int:
    """Return the slots per client. A lone client may hold all slots, and is always within its
    share.
    """
    count = len(held.keys() | set(queue.clients))
    return max(1, slots // count) if count > 1 else slots + 1


def _group_share(slots: int) -> int:
    return max(1, slots // GROUP_SHARE)


IDLE_TOKENS = 128
"""Prompt tokens of a step that nobody waits for: a request that comes meanwhile waits for one."""


class IdleWork:
    """Unawaited sequences. `active`: the only one that waits or runs. `later`: the rest."""

    def __init__(self) -> None:
        self.active: Sequence | None = None
        self.later: deque[Sequence] = deque()

    def take_up(self) -> Sequence:
        """Make the next sequence active, and return it."""
        self.active = self.later.popleft()
        return self.active

    def put_aside(self, sequence: Sequence) -> None:
        """Put the active sequence first in the queue, to resume later."""
        assert sequence is self.active
        self.active = None
        self.later.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        if sequence is self.active:
            self.active = None
        else:
            self.later.remove(sequence)
