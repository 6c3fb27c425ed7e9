"""Gives memory back to the machine, or to the cgroup, when too little of it is left.

Owns the marks between which it does so. Unused memory is released first, then what is cheapest
to recompute: cached pixels, embeddings, KV pages. What a request needs or a client has pinned
is kept. Checks once a second.

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
"""Memory is short when less than one part in so many of all is left."""
LEFT_PART = 10
"""Or of what was left at start-up, if that is less: a machine may have been full before."""
STALLED = 10.0
"""The marks are twice as high while processes wait for memory for so many percent of the time."""
BEATS = 2
"""Signs of life between two looks."""
RELEASED_PART = "saccade_memory_released_bytes_total"


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Bytes left. Memory is short below `low`, and until there is `enough`."""

    low: int
    enough: int

    @classmethod
    def of(cls, room: MemoryUsage) -> Watermarks:
        """Return the marks for a bound, as it is at start-up."""
        low = min(room.total // LOW_PART, room.left // LEFT_PART)
        return cls(low, low + low // 2)

    def missing(self, room: MemoryUsage, *, short: bool) -> int:
        """Return the bytes to release, 0 for none. short: memory was short before."""
        times = 2 if room.waits >= STALLED else 1
        least = self.enough if short else self.low
        return times * self.enough - room.left if room.left < times * least else 0


class MemoryWatch:
    """Has caches give way while memory is short. `tick` with each sign of life."""

    def __init__(
        self,
        machine: MachineMemory,
        scheduler: Scheduler,
        arena: Arena,
        page_bytes: int,
        metrics: Metrics,
    ) -> None:
        """Take the marks from what is left now.

        page_bytes: bytes released per free KV page, on all ranks; may be 0.
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
        """Look at memory with every second sign of life."""
        self._beats += 1
        if self._beats % BEATS == 0:
            self._look(self._machine.read())

    def _look(self, rooms: Iterable[MemoryUsage]) -> None:
        missing = max((self._missing(room) for room in rooms), default=0)
        if not missing and self._short:
            log.warning("memory is available again")
        elif missing and not self._short:
            log.warning("memory is short by %d MiB: evicting cache entries", -(-missing // MIB))
            self._give_back()
        elif missing and self._take_from_caches(missing):
            self._give_back()
        self._short = missing > 0

    def _missing(self, room: MemoryUsage) -> int:
        marks = self._marks.setdefault(
            room.bound, Watermarks.of(room)
        )  # one may be readable only now
        return marks.missing(room, short=self._short)

    def _take_from_caches(self, missing: int) -> bool:
        """Empty caches of about `missing` bytes, the cheapest first. Returns True if some were."""
        images = self._scheduler.image_scheduler
        pixels = images.slots.drop_kept(missing)
        embeddings = images.drop_embeddings(missing - pixels)
        pages, left = 0, missing - pixels - embeddings
        if self._page_bytes and left > 0:
            pages = self._scheduler.drop_pages(-(-left // self._page_bytes))
        self._metrics.inc(RELEASED_PART, embeddings, what="embeddings")
        return bool(pixels or embeddings or pages)

    def _give_back(self) -> None:
        """Release unused memory: here at once, in the workers with the next plan."""
        pixels = self._arena.release(self._scheduler.image_scheduler.slots.holes)
        self._metrics.inc(RELEASED_PART, pixels, what="pixels")
        self._scheduler.release_memory()
        trim()
