"""Unawaited requests, computed one after another while there are no other requests.

Owns their order and the active request. The scheduler takes the active one up, and puts it aside at
once for any other request. Work computed so far stays in the caches.
"""

from __future__ import annotations

from collections import deque

from saccade.sched.sequence import Sequence

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
        """Put the active sequence first in line, to go on another time."""
        assert sequence is self.active
        self.active = None
        self.later.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        if sequence is self.active:
            self.active = None
        else:
            self.later.remove(sequence)
