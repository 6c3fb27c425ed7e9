"""Decodes under way: one per image, with one frame or two, into the engine's slot in the arena.

Owns the tasks. The engine keeps finished pixels, and asks for an image only while no decode for it
is under way. Knows nothing of requests, or who else holds the arena.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import prod
from typing import Any

from saccade.core.metrics import Metrics
from saccade.core.plan import PixelSlot
from saccade.core.types import ImageKey
from saccade.media.workers.decode_queue import Job
from saccade.media.workers.pool import DecodePool


class Decoders:
    """Runs one decode per key at a time, over a pool of image workers."""

    def __init__(self, pool: DecodePool, metrics: Metrics) -> None:
        self.pool = pool
        self._metrics = metrics
        self._tasks: dict[ImageKey, asyncio.Task[None]] = {}

    async def decode(self, key: ImageKey, jobs: Sequence[Job], slot: PixelSlot) -> None:
        """Decode into `slot`, one below another. Writes to the slot end with the call.

        Raises ImageError for bytes that cannot be decoded, EngineUnavailable if image workers fail
        to start, CancelledError after `call_off`.
        """
        assert key not in self._tasks, "the engine asks for an image once at a time"
        task = asyncio.create_task(self._decode_all(jobs, slot.offset))
        self._tasks[key] = task
        try:
            await task
        finally:
            del self._tasks[key]
        self._metrics.inc("saccade_images_decoded_total")
        self._metrics.inc("saccade_image_bytes_shipped_total", slot.nbytes)

    async def _decode_all(self, jobs: Sequence[Job], offset: int) -> None:
        if len(jobs) == 1:
            await self.pool.decode(jobs[0], offset)
            return
        works = []
        for job in jobs:
            works.append(asyncio.create_task(self.pool.decode(job, offset)))
            offset += 3 * prod(job.recipe.canvas)
        try:
            await asyncio.gather(*works)
        finally:
            # The slot is safe when all have ended, not when one has failed.
            for work in works:
                work.cancel()
            await _all_ended(works)

    def call_off(self, key: ImageKey) -> None:
        """Stop the image's decode if it still runs."""
        if key in self._tasks:
            self._tasks[key].cancel()

    async def close(self) -> None:
        """End the workers, then all decodes."""
        await self.pool.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all_ended(works: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for cancelled tasks, however often this call is cancelled."""
    while not all(work.done() for work in works):
        try:
            await asyncio.wait(works)
        except asyncio.CancelledError:  # once was enough
            continue
