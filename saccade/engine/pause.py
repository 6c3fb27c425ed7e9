"""Tracks a pause of the server, during which new requests wait until a client resumes the server.

    running ──begin_pause──▶ ending ──settle──▶ paused ──leave──▶ running

In the state `ending`, a pause was requested, and running requests are finishing or being frozen.
`settle` completes it once no work is left. `end_pause` requests the resumption, which `leave` then
carries out.
"""

from __future__ import annotations

from typing import Literal

from saccade.core.plan import Changed
from saccade.core.types import Delta, Request
from saccade.ipc.messages import Altered


class PauseState:
    """The state of a pause, and the requests that wait until it is over."""

    def __init__(self) -> None:
        self.state: Literal["running", "ending", "paused"] = "running"
        self.keeps = False  # requests in flight are frozen, and continue after the pause
        self._pause_ids: list[int] = []
        self._resume_ids: list[int] = []
        self._held: dict[str, Request] = {}

    @property
    def holds(self) -> bool:
        """Return True if new requests must wait."""
        return self.state != "running"

    @property
    def freezes(self) -> bool:
        """Return True if no steps may be planned for requests that are already running."""
        return self.state == "paused" or (self.holds and self.keeps)

    @property
    def waiting(self) -> bool:
        """Return True if any request waits until the pause is over."""
        return bool(self._held)

    @property
    def empty(self) -> bool:
        """Return True if the server is paused and has no frozen requests."""
        return self.state == "paused" and not self.keeps

    @property
    def leaving(self) -> bool:
        """Return True if a client has requested that the pause end."""
        return bool(self._resume_ids)

    def begin_pause(self, id: int, keeps: bool) -> None:
        """Start a pause, or join the one that has started. `settle` later returns the response.

        id: the id of the `Pause` message.
        keeps: True to freeze running requests, False to finish them first.
        """
        self._pause_ids.append(id)
        if self.state == "running":
            self.state, self.keeps = "ending", keeps

    def settle(self, idle: bool) -> list[Altered]:
        """Complete the pause if `idle`, and return the responses to pending `Pause` messages.

        idle: True if all work is finished or frozen.
        """
        if not (self._pause_ids and idle):
            return []
        self.state = "paused"
        altered, self._pause_ids = [Altered(id, Changed()) for id in self._pause_ids], []
        return altered

    def end_pause(self, id: int) -> None:
        """Request the end of the pause. `leave` later returns the response.

        id: the id of the `Resume` message.
        """
        self._resume_ids.append(id)

    def leave(self) -> tuple[list[Request], list[Altered]]:
        """End the pause if that was requested.

        Returns the requests that have waited, and the responses to pending `Resume` messages.
        """
        if not self._resume_ids:
            return [], []
        held, self._held = list(self._held.values()), {}
        altered, self._resume_ids = [Altered(id, Changed()) for id in self._resume_ids], []
        self.state = "running"
        return held, altered

    def hold_request(self, request: Request) -> None:
        self._held[request.id] = request

    def drop(self, id: str) -> bool:
        """Remove a request. Return True if it was waiting here."""
        return self._held.pop(id, None) is not None

    def fail_all(self, error: str) -> list[Delta]:
        """Remove every waiting request, and return a delta with the error for each."""
        held, self._held = self._held, {}
        return [Delta(id, finish="error", error=error) for id in held]
