"""Decodes under way: one per image, into the slot of the arena that the engine has named.

Owns the tasks. Knows nothing of requests, of who else holds the arena, or of pixels once they are
there: the engine keeps those, and asks for an image only while none of its decodes is under way.
"""

from __future__ import annotations

import asyncio

from saccade.core.metrics import Metrics
from saccade.core.plan import PixelSlot
from saccade.core.types import ImageKey
from saccade.media.decode_queue import Job
from saccade.media.pool import DecodePool


class Decoders:
    """Single flight per key over a pool of image workers."""

    def __init__(self, pool: DecodePool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._tasks: dict[ImageKey, asyncio.Task[None]] = {}

    async def decode(self, key: ImageKey, job: Job, slot: PixelSlot) -> None:
        """Decode into `slot`. When this returns or raises, nothing writes to the slot any more.

        Raises ImageError when the bytes cannot be decoded, EngineUnavailable when no image worker
        starts, CancelledError after `call_off`.
        """
        assert key not in self._tasks, "the engine asks for an image once at a time"
        task = asyncio.create_task(self._pool.decode(job, slot.offset))
        self._tasks[key] = task
        try:
            await task
        finally:
            del self._tasks[key]
        self._metrics.inc("saccade_images_decoded_total")
        self._metrics.inc("saccade_image_bytes_shipped_total", slot.nbytes)

    def call_off(self, key: ImageKey) -> None:
        """Nobody needs the image: stop decoding it, if that has not ended."""
        if key in self._tasks:
            self._tasks[key].cancel()

    async def close(self) -> None:
        """End the workers, then all decodes."""
        await self._pool.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
