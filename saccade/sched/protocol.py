"""The contract between the engine's loop and the scheduler of the workers.

`scheduler.py` answers prompts. A plugin's gives embeddings away. Both make plans in order, up to
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
    """What the engine's loop needs from a scheduler.

    `apply` answers the oldest plan in flight. Anything else may be called at any time.
    """

    counts: Counts
    embeddings: EmbeddingCache
    image_scheduler: ImageScheduler

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
        """Return True if all requests have finished and the workers have released their slots."""
        ...

    def add_request(self, request: Request) -> list[Delta]:
        """Queue a request under a new id. An impossible request gets its terminal delta at once."""
        ...

    def abort(self, id: str) -> list[Delta]:
        """End a request whose client has left. Returns an empty list if it has already ended."""
        ...

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error."""
        ...

    def pixels_ready(
        self, key: ImageKey, pixels: bytes = b"", tiles: tuple[bytes, ...] = ()
    ) -> list[Delta]:
        """Take an image that the front has decoded into the slot named by `Notices.want`.

        pixels, tiles: as in `PixelsReady`.
        """
        ...

    def pixels_failed(self, key: ImageKey, error: str) -> list[Delta]:
        """End every request that is stuck, as the front has given up writing to the slot."""
        ...

    def flush(self, embeddings: bool, disk: bool = True) -> None:
        """Forget cached pages and, with `embeddings`, also embeddings and pixels.

        The disk is cleared only with `disk`.
        """
        ...

    def drop_pages(self, pages: int) -> int:
        """Forget up to `pages` cached pages kept for later use. Returns their number."""
        ...

    def release_memory(self) -> None:
        """Release unused memory with the next plan."""
        ...

    def take_notices(self) -> Notices:
        """Return the news for the front, and clear it."""
        ...

    def plan(self) -> Plan:
        """Return the next step. Legal while fewer than two are in flight.

        The plan must be applied unless `empty`. Then there is work only after a message arrives or
        a plan in flight is applied.
        """
        ...

    def apply(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest plan in flight."""
        ...
