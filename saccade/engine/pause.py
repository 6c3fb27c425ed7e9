"""A pause: what comes in waits until somebody resumes.

    running ──begin──▶ ending ──nothing is left to do──▶ paused ──end──▶ running

Owns the requests that wait. `keep`: requests in flight are frozen where they are, and go on later.
"""

from __future__ import annotations

from typing import Literal

from saccade.core.plan import Changed
from saccade.core.types import Delta, Request
from saccade.ipc.messages import Altered


class Intermission:
    """`state`: as above. `keeps`: requests in flight go on after it."""

    def __init__(self) -> None:
        self.state: Literal["running", "ending", "paused"] = "running"
        self.keeps = False
        self._asked: list[int] = []
        self._ending: list[int] = []
        self._held: dict[str, Request] = {}

    @property
    def holds(self) -> bool:
        """True if new requests wait."""
        return self.state != "running"

    @property
    def freezes(self) -> bool:
        """True if no step of a request is planned."""
        return self.state == "paused" or (self.holds and self.keeps)

    @property
    def waiting(self) -> bool:
        """True if some request waits."""
        return bool(self._held)

    @property
    def empty(self) -> bool:
        """True if paused with no request alive that was computed for."""
        return self.state == "paused" and not self.keeps

    def begin(self, id: int, keeps: bool) -> None:
        """Answered by `settle`. A pause that is there stays as it is."""
        self._asked.append(id)
        if self.state == "running":
            self.state, self.keeps = "ending", keeps

    def settle(self, idle: bool) -> list[Altered]:
        """What to tell those that asked, once nothing is left to do."""
        if not (self._asked and idle):
            return []
        self.state = "paused"
        told, self._asked = [Altered(id, Changed()) for id in self._asked], []
        return told

    def end(self, id: int) -> None:
        """Answered by `leave`."""
        self._ending.append(id)

    def leave(self) -> tuple[list[Request], list[Altered]]:
        """End the pause, if anybody has asked for it: the requests that have waited, and what to
        tell those that asked.
        """
        if not self._ending:
            return [], []
        held, self._held = list(self._held.values()), {}
        told, self._ending = [Altered(id, Changed()) for id in self._ending], []
        self.state = "running"
        return held, told

    def hold(self, request: Request) -> None:
        self._held[request.id] = request

    def drop(self, id: str) -> bool:
        """Forget a request. False if it does not wait here."""
        return self._held.pop(id, None) is not None

    def fail_all(self, error: str) -> list[Delta]:
        """End every waiting request with an error."""
        held, self._held = self._held, {}
        return [Delta(id, finish="error", error=error) for id in held]
