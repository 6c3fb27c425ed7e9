"""Unawaited requests: computed while no other request is present, one after another.

Owns their order and the active request. The scheduler takes the active one up, and puts it aside at
once for any other request: work computed so far stays in the caches.
"""

from __future__ import annotations

from collections import deque

from saccade.sched.sequence import Sequence

IDLE_TOKENS = 128
"""Prompt tokens of a step that nobody waits for: a request that comes meanwhile waits for one."""


class IdleWork:
    """`active`: the only one to wait or run among the scheduler's sequences. `later`: the rest."""

    def __init__(self) -> None:
        self.active: Sequence | None = None
        self.later: deque[Sequence] = deque()

    def take_up(self) -> Sequence:
        """The next sequence is active from now on."""
        self.active = self.later.popleft()
        return self.active

    def put_aside(self, sequence: Sequence) -> None:
        """The active sequence goes on first, another time."""
        assert sequence is self.active
        self.active = None
        self.later.appendleft(sequence)

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if sequence is self.active:
            self.active = None
        else:
            self.later.remove(sequence)
