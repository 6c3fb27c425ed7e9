"""The engine's orders, one step at a time, for a worker.

Owns what came while a plan's steps were being computed. A `Halt` takes the rows from what is left
of a plan of several steps. Knows nothing of tensors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from saccade.core.plan import Halt, Plan
from saccade.ipc.child import Channel
from saccade.ipc.messages import Finish, FromWorker, ToWorker


class Orders:
    """The receiving side of the link to the engine."""

    def __init__(self, engine: Channel[FromWorker, ToWorker]) -> None:
        self._engine = engine
        self._early: deque[ToWorker] = deque()
        self._left: Plan | None = None  # of a plan of several steps

    def waiting(self) -> bool:
        """Return True if `receive` has something to report, be it the engine's departure."""
        return self._left is not None or bool(self._early) or self._engine.waiting()

    def receive(self) -> ToWorker:
        """Wait for a plan, of which the first step is due, or for another order.

        Raises Disconnected.
        """
        plan = self._left
        while plan is None:
            message = self._early.popleft() if self._early else self._engine.receive()
            if isinstance(message, Plan) and message.steps > 1:
                plan = message
            elif not isinstance(message, Halt):  # one that has come too late
                return message
        if plan.steps > 1 and self._halted():
            self._left = None
            return replace(plan, steps=0)
        self._left = plan.rest if plan.steps > 1 else None
        return plan

    def _halted(self) -> bool:
        """Look at what has come meanwhile. Plans that go on from the last step come behind it."""
        while self._engine.waiting():
            self._early.append(self._engine.receive())
            if isinstance(self._early[-1], Halt | Finish):
                return True
        return False
