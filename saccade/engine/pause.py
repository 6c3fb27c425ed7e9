"""A pause: what comes in waits until somebody resumes.

    running ──begin──▶ ending ──nothing is left to do──▶ paused ──end──▶ running

Owns the requests that wait. `keep`: requests in flight are frozen where they are, and continue
later.
"""

from __future__ import annotations

from typing import Literal

from saccade.core.plan import Changed
from saccade.core.types import Delta, Request
from saccade.ipc.messages import Altered


class PauseState:
    """A pause's state, and the requests that wait.

    `state`: as above. `keeps`: requests in flight continue after it.
    """

    def __init__(self) -> None:
        self.state: Literal["running", "ending", "paused"] = "running"
        self.keeps = False
        self._asked: list[int] = []
        self._ending: list[int] = []
        self._held: dict[str, Request] = {}

    @property
    def holds(self) -> bool:
        """Return True if new requests wait."""
        return self.state != "running"

    @property
    def freezes(self) -> bool:
        """Return True if all requests' steps stay unplanned."""
        return self.state == "paused" or (self.holds and self.keeps)

    @property
    def waiting(self) -> bool:
        """Return True if some request waits."""
        return bool(self._held)

    @property
    def empty(self) -> bool:
        """Return True if paused, with every request that was in flight done."""
        return self.state == "paused" and not self.keeps

    @property
    def leaving(self) -> bool:
        """Return True if somebody has asked for the pause's end."""
        return bool(self._ending)

    def begin_pause(self, id: int, keeps: bool) -> None:
        """Begin a pause, which `settle` answers. A pause in progress stays as it is."""
        self._asked.append(id)
        if self.state == "running":
            self.state, self.keeps = "ending", keeps

    def settle(self, idle: bool) -> list[Altered]:
        """Return the replies to pending pause requests, once all work is done."""
        if not (self._asked and idle):
            return []
        self.state = "paused"
        altered, self._asked = [Altered(id, Changed()) for id in self._asked], []
        return altered

    def end_pause(self, id: int) -> None:
        """Request the end of the pause, which `leave` confirms."""
        self._ending.append(id)

    def leave(self) -> tuple[list[Request], list[Altered]]:
        """End the pause, if anybody has asked for it.

        Returns the requests that have waited, and the replies to pending pause requests.
        """
        if not self._ending:
            return [], []
        held, self._held = list(self._held.values()), {}
        altered, self._ending = [Altered(id, Changed()) for id in self._ending], []
        self.state = "running"
        return held, altered

    def hold_request(self, request: Request) -> None:
        self._held[request.id] = request

    def drop(self, id: str) -> bool:
        """Forget a request. Returns True if it was waiting here."""
        return self._held.pop(id, None) is not None

    def fail_all(self, error: str) -> list[Delta]:
        """End every waiting request with an error."""
        held, self._held = self._held, {}
        return [Delta(id, finish="error", error=error) for id in held]
