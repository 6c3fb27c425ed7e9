"""The contract between the engine's loop and the scheduler of the workers.

`scheduler.py` answers prompts, `encoding.py` gives embeddings away. Both make plans in order, up to
`PLANS_IN_FLIGHT` before the oldest is applied.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

from saccade.cache.embeddings import EmbeddingCache
from saccade.core.plan import Plan, StepResult
from saccade.core.types import Delta, ImageKey, Request
from saccade.sched.images.image_scheduler import ImageScheduler
from saccade.sched.images.slots import Notices
from saccade.sched.limits import Counts


class Scheduler(Protocol):
    """`apply` answers the oldest plan in flight; anything else may be called at any time."""

    counts: Counts
    embeddings: EmbeddingCache
    gallery: ImageScheduler

    @property
    def running(self) -> Sized:
        """Requests that the workers compute for."""
        ...

    @property
    def waiting(self) -> Sized:
        """Requests in the queue."""
        ...

    @property
    def idle(self) -> bool:
        """True if no request is alive and the workers hold nothing for any."""
        ...

    def add(self, request: Request) -> list[Delta]:
        """Queue a request; its id must be new. An impossible request gets its terminal delta at
        once.
        """
        ...

    def abort(self, id: str) -> list[Delta]:
        """The client has left. No delta if the request has already ended."""
        ...

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error."""
        ...

    def pixels_ready(self, key: ImageKey, pixels: bytes = b"") -> list[Delta]:
        """The front has decoded an image into the slot named by `Notices.want`. pixels: as in
        `PixelsReady`.
        """
        ...

    def pixels_failed(self, key: ImageKey, error: str) -> list[Delta]:
        """The front writes to the slot no more. Ends every request that cannot go on."""
        ...

    def flush(self, embeddings: bool, disk: bool = True) -> None:
        """Forget cached pages; with `embeddings`, also embeddings and pixels; on disk only
        with `disk`.
        """
        ...

    def take_notices(self) -> Notices:
        """News for the front, each once."""
        ...

    def plan(self) -> Plan:
        """The next step; legal while fewer than two are in flight.

        The plan must be applied unless `empty`: then no work is left until a message arrives or a
        plan in flight is applied.
        """
        ...

    def apply(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest plan in flight."""
        ...
