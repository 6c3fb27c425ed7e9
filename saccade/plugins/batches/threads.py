"""Runs clients' calls to the store on separate threads, so that listing batches does not delay
other work.

Only one call of a client runs at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from saccade.core.client import Client
from saccade.core.errors import StorageBusy
from saccade.media.sources.fairness import FairPermits, Requester, Ticket

PLACES = 4
PATIENCE = 60.0
"""Maximum seconds to wait for a thread and for the disk, in total."""

T = TypeVar("T")


class StoreThreads:
    """A pool of threads that clients share round-robin."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(PLACES, "saccade-batches")
        self._turns = FairPermits(PLACES, per_client=1, per_request=1)

    async def run(self, client: Client, work: Callable[[], T]) -> T:
        """Run `work` on a thread when it is the client's turn, and return its result.

        Raises StorageBusy if it does not finish within `PATIENCE` seconds, and any exception of
        `work`.
        """
        ticket = Ticket()
        self._turns.enter(ticket, Requester(client.share("")))
        step: asyncio.Future[T] | None = None
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.shield(ticket.turn)
                step = asyncio.get_running_loop().run_in_executor(self._threads, work)
                return await asyncio.shield(step)
        except TimeoutError:
            raise StorageBusy(
                f"the batch directory did not respond for {PATIENCE:g} s, or is busy with your "
                "other requests: try again later"
            ) from None
        finally:
            if step is None or step.done():
                self._turns.leave(ticket)
            else:  # the slot remains in use until the thread has finished
                step.add_done_callback(lambda late: self._end_late(ticket, late))

    def close(self) -> None:
        """Accept no more work. Running work is not interrupted."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end_late(self, ticket: Ticket, step: asyncio.Future[T]) -> None:
        self._turns.leave(ticket)
        if not step.cancelled():
            step.exception()  # mark it as retrieved
