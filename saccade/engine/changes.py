"""Changes of the model's weights that the front has asked for: which may be made now, and what came
of each.

Owns the changes in progress, and which request has which adapter. A change goes with a plan, so
every rank makes it between the same two steps. An adapter is dropped once no request and no
encoding has it; changes behind it do not wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from saccade.core.plan import Change, Changed, Memory
from saccade.core.types import Delta, Request
from saccade.ipc.messages import Alter, Altered

ALONE = frozenset({"weights", "sleep", "wake"})
"""Kinds of changes while which nothing is computed."""


class Changes:
    """The weight changes in progress.

    `encodes_with`: whether an image is being encoded with the adapter of a number. `asleep`: the
    memory that workers have released.
    """

    def __init__(self, encodes_with: Callable[[int], bool]) -> None:
        self.asleep: tuple[Memory, ...] = ()
        self._encodes_with = encodes_with
        self._waiting: deque[Alter] = deque()
        self._sent: deque[Alter] = deque()
        self._users: dict[str, int] = {}  # the adapter of each living request that has one

    @property
    def under_way(self) -> bool:
        return bool(self._waiting or self._sent)

    @property
    def halts(self) -> bool:
        """Return True if computing must rest.

        Weights or memory are about to change, or memory is released.
        """
        under_way = (*self._waiting, *self._sent)
        return bool(self.asleep) or any(each.change.kind in ALONE for each in under_way)

    def entered(self, request: Request) -> None:
        """Record that a request with an adapter is alive from now on."""
        self._users[request.id] = request.adapter.number

    def ended(self, deltas: Iterable[Delta]) -> None:
        """Forget the requests that these deltas end."""
        if self._users:
            for delta in deltas:
                if delta.finish is not None:
                    self._users.pop(delta.id, None)

    @staticmethod
    def is_exclusive(change: Change) -> bool:
        """Return True for a change that requires all computation to stop."""
        return change.kind in ALONE

    def add(self, alter: Alter) -> None:
        self._waiting.append(alter)

    def take_change(self) -> Change | None:
        """Return the next change that may be made. It goes with the next plan."""
        for alter in self._waiting:
            if self._may(alter.change):
                self._waiting.remove(alter)
                self._sent.append(alter)
                return alter.change
        return None

    def made(self, changed: Changed) -> Altered:
        """Return the outcome of the oldest change that went with a plan."""
        self.asleep = changed.asleep
        return Altered(self._sent.popleft().id, changed)

    def _may(self, change: Change) -> bool:
        if change.kind != "drop adapter":
            return True
        used = change.adapter in self._users.values()
        return not (used or self._encodes_with(change.adapter))
