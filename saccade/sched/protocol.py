"""The interface between the engine loop and a scheduler.

`scheduler.py` generates text. The scheduler of a plugin computes embeddings for other servers. Both
make plans in order, with up to `PLANS_IN_FLIGHT` plans whose results are not applied yet.
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
    """The methods of a scheduler that the engine loop calls.

    `apply` takes the result of the oldest plan in flight. All other methods may be called at any
    time.
    """

    counts: Counts
    embeddings: EmbeddingCache
    image_scheduler: ImageScheduler

    @property
    def running(self) -> Sized:
        """The requests that the workers compute."""
        ...

    @property
    def waiting(self) -> Sized:
        """The requests in the queue."""
        ...

    @property
    def idle(self) -> bool:
        """Return True if all requests have finished and the workers have released their slots."""
        ...

    def add_request(self, request: Request) -> list[Delta]:
        """Queue a request, whose id must be new. A request that can never run gets its final delta
        at once.
        """
        ...

    def abort(self, id: str) -> list[Delta]:
        """Cancel a request, whose client has disconnected. Returns an empty list if it has already
        ended.
        """
        ...

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error."""
        ...

    def pixels_ready(
        self, key: ImageKey, pixels: bytes = b"", tiles: tuple[bytes, ...] = ()
    ) -> list[Delta]:
        """Use an image that the front has decoded into the slot from `Notices.want`.

        pixels, tiles: as in `PixelsReady`.
        """
        ...

    def pixels_failed(self, key: ImageKey, error: str) -> list[Delta]:
        """End every request that needs an image that could not be decoded."""
        ...

    def flush(self, embeddings: bool, disk: bool = True) -> None:
        """Clear the KV prefix cache, and with `embeddings` also cached embeddings and pixels.

        disk: also clear the disk.
        """
        ...

    def drop_pages(self, pages: int) -> int:
        """Evict up to `pages` cached pages that are not in use. Returns the number of evicted
        pages.
        """
        ...

    def release_memory(self) -> None:
        """Have the next plan return unused memory to the operating system."""
        ...

    def take_notices(self) -> Notices:
        """Return the updates for the front since the last call."""
        ...

    def plan(self) -> Plan:
        """Return the next step. Must not be called while `PLANS_IN_FLIGHT` plans are in flight.

        A plan must be executed and applied unless it is `empty`. After an empty plan, call this
        again once a message has arrived or a plan in flight has been applied.
        """
        ...

    def apply(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest plan in flight."""
        ...
