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
        """The requests that the workers are computing."""
        ...

    @property
    def waiting(self) -> Sized:
        """The requests that wait to be admitted."""
        ...

    @property
    def idle(self) -> bool:
        """Return True if all requests have finished and the workers have released their slots."""
        ...

    def add_request(self, request: Request) -> list[Delta]:
        """Queue a request, whose id must be new. Return its deltas, if any.

        A request that can never run gets its final delta at once.
        """
        ...

    def abort(self, id: str) -> list[Delta]:
        """Cancel a request whose client has disconnected, and return its final delta.

        Returns an empty list if the request has already ended.
        """
        ...

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error, and return the final deltas."""
        ...

    def pixels_ready(
        self, key: ImageKey, pixels: bytes = b"", tiles: tuple[bytes, ...] = ()
    ) -> list[Delta]:
        """Record that the front end has decoded an image into the slot from `Notices.want`.

        pixels, tiles: as in `PixelsReady`.
        """
        ...

    def pixels_failed(self, key: ImageKey, error: str) -> list[Delta]:
        """End every request that needs this image, which the front end could not decode."""
        ...

    def flush(self, embeddings: bool, disk: bool = True) -> None:
        """Clear the KV prefix cache, except for what running requests use.

        embeddings: True to also clear cached embeddings and pixels.
        disk: True to also clear the disk.
        """
        ...

    def drop_pages(self, pages: int) -> int:
        """Evict up to `pages` cached pages that are not in use. Return how many were evicted."""
        ...

    def release_memory(self) -> None:
        """Let the next plan return unused memory to the operating system."""
        ...

    def take_notices(self) -> Notices:
        """Return the updates for the front end since the last call, and clear them."""
        ...

    def plan(self) -> Plan:
        """Return the next step. Must not be called while `PLANS_IN_FLIGHT` plans are in flight.

        A plan must be executed and applied unless it is `empty`. After an empty plan, call this
        again once a message has arrived or a plan in flight has been applied.
        """
        ...

    def apply(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest plan in flight, and return the front end's deltas."""
        ...
