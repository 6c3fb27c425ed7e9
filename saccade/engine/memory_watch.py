"""Returns memory to the operating system when the machine or a cgroup is running out of it.

Unused memory is released first. Then caches are evicted, starting with the ones that are cheapest
to recompute: pixels, embeddings, KV pages. Data that requests use or clients have pinned stays.
Memory is checked once per second, with two watermarks:

    enough left ──less than `low`──▶ short ──more than `enough`──▶ enough left
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saccade.core.arena import Arena
from saccade.core.config import MIB
from saccade.core.metrics import Metrics
from saccade.ipc.memory import MachineMemory, MemoryUsage, trim

if TYPE_CHECKING:
    from saccade.sched.protocol import Scheduler

log = logging.getLogger("saccade")

LOW_PART = 20
"""Memory is short if less than 1/LOW_PART of the total is left."""
LEFT_PART = 10
"""The limit is 1/LEFT_PART of the memory available at start-up if that is less, because the machine
may already have been full.
"""
STALLED = 10.0
"""If processes wait for memory for at least this percentage of the time, the watermarks are
doubled.
"""
BEATS = 2
"""Number of heartbeats per check."""
RELEASED_PART = "saccade_memory_released_bytes_total"


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The remaining bytes at which memory counts as short (below `low`) and as sufficient again
    (above `enough`).
    """

    low: int
    enough: int

    @classmethod
    def of(cls, room: MemoryUsage) -> Watermarks:
        """Return the watermarks for one memory limit, given its usage at start-up."""
        low = min(room.total // LOW_PART, room.left // LEFT_PART)
        return cls(low, low + low // 2)

    def missing(self, room: MemoryUsage, *, short: bool) -> int:
        """Return how many bytes to release, or 0.

        short: True if memory was short at the last check.
        """
        times = 2 if room.waits >= STALLED else 1
        least = self.enough if short else self.low
        return times * self.enough - room.left if room.left < times * least else 0


class MemoryWatch:
    """Evicts cached data while memory is short. Call `tick` with each heartbeat."""

    def __init__(
        self,
        machine: MachineMemory,
        scheduler: Scheduler,
        arena: Arena,
        page_bytes: int,
        metrics: Metrics,
    ) -> None:
        """Set the watermarks from the memory that is left now.

        page_bytes: how many bytes evicting a KV page releases on all ranks together, or 0 if it
            releases none.
        """
        self._machine = machine
        self._scheduler = scheduler
        self._arena = arena
        self._page_bytes = page_bytes
        self._metrics = metrics
        self._marks = {room.bound: Watermarks.of(room) for room in machine.read()}
        self._short = False
        self._beats = 0

    def tick(self) -> None:
        """Check memory once in every `BEATS` calls."""
        self._beats += 1
        if self._beats % BEATS == 0:
            self._look(self._machine.read())

    def _look(self, rooms: Iterable[MemoryUsage]) -> None:
        missing = max((self._missing(room) for room in rooms), default=0)
        if not missing and self._short:
            log.warning("memory is available again")
        elif missing and not self._short:
            log.warning("memory is short by %d MiB: evicting cache entries", -(-missing // MIB))
            self._release_unused()
        elif missing and self._evict_cached(missing):
            self._release_unused()
        self._short = missing > 0

    def _missing(self, room: MemoryUsage) -> int:
        # A limit may be readable only now, if its file did not exist at start-up.
        marks = self._marks.setdefault(room.bound, Watermarks.of(room))
        return marks.missing(room, short=self._short)

    def _evict_cached(self, missing: int) -> bool:
        """Evict about `missing` bytes of cached data, the cheapest to recompute first.

        Returns True if any was evicted.
        """
        images = self._scheduler.image_scheduler
        pixels = images.slots.drop_kept(missing)
        embeddings = images.drop_embeddings(missing - pixels)
        pages, left = 0, missing - pixels - embeddings
        if self._page_bytes and left > 0:
            pages = self._scheduler.drop_pages(-(-left // self._page_bytes))
        self._metrics.inc(RELEASED_PART, embeddings, what="embeddings")
        return bool(pixels or embeddings or pages)

    def _release_unused(self) -> None:
        """Return unused memory of this process to the operating system now, and of the workers with
        the next plan.
        """
        pixels = self._arena.release(self._scheduler.image_scheduler.slots.holes)
        self._metrics.inc(RELEASED_PART, pixels, what="pixels")
        self._scheduler.release_memory()
        trim()
