"""The order in which waiting sequences are admitted, and the queue of background requests.

Clients take turns (round-robin), and so do the groups of each client. Groups of lower `priority`
are first. A group consists of the `n` choices of one HTTP request.

A client moves to the end of the queue when one of its sequences is admitted, and when it enters the
queue. A group does the same among its client's groups. So between two turns of a waiting client,
every other client has at most one turn. Preempted sequences come before all others, because they
have already had their turn.

Round-robin alone would give all slots to the first client. So sequences of clients that already
have their share of the slots come last, and a client without a slot may preempt a client that
exceeds its share. A client's share is the number of slots divided by the number of clients. A
group's share is half of the slots.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain

from saccade.sched.sequence import Sequence

Groups = dict[str, list[Sequence]]
"""One client's waiting sequences by group, the group whose turn is next first. Each list is in
order of arrival.
"""

GROUP_SHARE = 2
"""While another group of the same client waits, a group may use 1/GROUP_SHARE of the slots."""


class TurnQueue:
    """Queues waiting sequences. Iterating over it yields them in the order of their turns."""

    def __init__(self) -> None:
        self._clients: dict[str, Groups] = {}  # the client whose turn is next first
        self._returned: list[Sequence] = []  # preempted sequences, in order of arrival
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in the order of their turns. You may remove sequences while
        iterating.
        """
        queues = (_in_order(tuple(groups.values())) for groups in self._clients.values())
        return chain(tuple(self._returned), _round_robin(tuple(queues)))

    @property
    def clients(self) -> Iterable[str]:
        """The clients with waiting sequences."""
        return self._clients.keys() | {sequence.client for sequence in self._returned}

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to its client's queue."""
        group = self._clients.setdefault(sequence.client, {}).setdefault(sequence.group, [])
        insort(group, sequence, key=lambda s: s.order)
        self._length += 1

    def put_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence, before those that were not preempted."""
        insort(self._returned, sequence, key=lambda s: s.order)
        self._length += 1

    def remove(self, sequence: Sequence, served: bool) -> None:
        """Remove a sequence.

        served: True if the sequence is being admitted. Then its group and its client move to the
            end of the queue.
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
    """Yield the waiting sequences in the order of their turns.

    Sequences whose client or group already has its share of the slots come last.
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
    """Return the running sequence to preempt for `newcomer`, whose client or group has no slot.

    It is the youngest sequence of a client or group that exceeds its share. Returns None if no
    client or group does.
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
    clients = Counter(sequence.client for sequence in running)
    return clients, Counter((sequence.client, sequence.group) for sequence in running)


def _client_share(held: Counter[str], queue: TurnQueue, slots: int) -> int:
    """Return each client's share of the slots. The share of a single client is never exceeded."""
    count = len(held.keys() | set(queue.clients))
    return max(1, slots // count) if count > 1 else slots + 1


def _group_share(slots: int) -> int:
    return max(1, slots // GROUP_SHARE)


IDLE_TOKENS = 128
"""Maximum prompt tokens in a step of a background request, because a new request has to wait for
that step.
"""


class IdleWork:
    """The queue of background requests. They run one at a time, while there are no other
    requests.
    """

    def __init__(self) -> None:
        self.active: Sequence | None = None  # the only one that is waiting or running
        self.later: deque[Sequence] = deque()  # the others

    def take_up(self) -> Sequence:
        """Make the next sequence active, and return it."""
        self.active = self.later.popleft()
        return self.active

    def put_aside(self, sequence: Sequence) -> None:
        """Move the active sequence to the front of the queue. It is resumed later."""
        assert sequence is self.active
        self.active = None
        self.later.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        if sequence is self.active:
            self.active = None
        else:
            self.later.remove(sequence)
