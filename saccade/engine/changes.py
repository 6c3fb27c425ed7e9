"""Queues changes to the model's weights or memory that the front end has requested, and decides
when each may be made.

A change is sent with a plan, so that every rank makes it between the same two steps. An adapter is
dropped once no request and no encoding uses it. Later changes do not wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from saccade.core.plan import Change, Changed, Memory
from saccade.core.types import Delta, Request
from saccade.ipc.messages import Alter, Altered

ALONE = frozenset({"weights", "sleep", "wake"})
"""Kinds of changes during which no requests are computed."""


class Changes:
    """Tracks pending changes, and which adapter each request uses."""

    def __init__(self, encodes_with: Callable[[int], bool]) -> None:
        """Start without changes.

        encodes_with: returns True if an image is being encoded with the adapter of this index.
        """
        self.asleep: tuple[Memory, ...] = ()  # memory that the workers have released
        self._encodes_with = encodes_with
        self._waiting: deque[Alter] = deque()
        self._sent: deque[Alter] = deque()
        self._users: dict[str, int] = {}  # active requests with an adapter: id -> adapter index

    @property
    def under_way(self) -> bool:
        return bool(self._waiting or self._sent)

    @property
    def halts(self) -> bool:
        """Return True if no requests may be computed, because weights or memory are about to
        change.
        """
        under_way = (*self._waiting, *self._sent)
        return bool(self.asleep) or any(each.change.kind in ALONE for each in under_way)

    def entered(self, request: Request) -> None:
        """Record that a request with an adapter has started."""
        self._users[request.id] = request.adapter.number

    def ended(self, deltas: Iterable[Delta]) -> None:
        """Forget the requests that these deltas finish, so that their adapters may be dropped."""
        if self._users:
            for delta in deltas:
                if delta.finish is not None:
                    self._users.pop(delta.id, None)

    @staticmethod
    def is_exclusive(change: Change) -> bool:
        """Return True for a change during which no requests may be computed."""
        return change.kind in ALONE

    def add(self, alter: Alter) -> None:
        self._waiting.append(alter)

    def take_change(self) -> Change | None:
        """Remove and return the first queued change that is allowed now, or None.

        Send it with the next plan.
        """
        for alter in self._waiting:
            if self._is_allowed(alter.change):
                self._waiting.remove(alter)
                self._sent.append(alter)
                return alter.change
        return None

    def made(self, changed: Changed) -> Altered:
        """Return the response to the oldest change that was sent with a plan, and remove the
        change.
        """
        self.asleep = changed.asleep
        return Altered(self._sent.popleft().id, changed)

    def _is_allowed(self, change: Change) -> bool:
        if change.kind != "drop adapter":
            return True
        used = change.adapter in self._users.values()
        return not (used or self._encodes_with(change.adapter))
