"""Who holds which part of the pixel arena, and who waits for room.

A slot's life: reserved (a worker writes it) -> ahead (decoded before the engine asked) -> leased
(the engine's, until it says it is done) -> cached (nobody's; serves the next who asks, and makes
room when room is needed).

Nothing here can deadlock. Decoding ahead may fill half of the arena only; what the engine asked for
("urgent") may take all of it, dropping cached slots first and slots decoded ahead next, so it waits
for nothing but running decodes and the engine's own slots. When it is the latter, `wait_full` says
so, for the engine to give back what it has no use for yet.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from saccade.core.arena import Arena
from saccade.core.metrics import Metrics
from saccade.core.plan import PixelSlot
from saccade.core.types import ImageKey
from saccade.media.turns import Job


@dataclass(slots=True)
class Entry:
    """Decoded pixels of one picture.

    `leases` counts how often the engine holds it; `ahead`: decoded for an engine yet to ask.
    """

    slot: PixelSlot
    leases: int
    ahead: bool

    @property
    def cached(self) -> bool:
        return self.leases == 0 and not self.ahead


class Slots:
    """The front's book of the arena. All methods run on the event loop."""

    def __init__(self, arena: Arena, metrics: Metrics) -> None:
        self._arena = arena
        self._metrics = metrics
        self._busy: dict[ImageKey, Entry] = {}  # ahead or leased
        self._cached: dict[ImageKey, Entry] = {}  # least recently used first
        self._keys: dict[int, ImageKey] = {}  # by offset
        self._writing: dict[int, Job] = {}  # by offset
        self._waiting: dict[Job, asyncio.Future[int]] = {}
        self._full = asyncio.Event()

    def __contains__(self, key: ImageKey) -> bool:
        return key in self._busy or key in self._cached

    @property
    def ahead_limit(self) -> int:
        """Bytes that decoding ahead may fill."""
        return self._arena.size // 2

    def reusable(self, key: ImageKey) -> bool:
        """Whether the pixels of `key` are still here from an earlier use."""
        return key in self._cached or (key in self._busy and not self._busy[key].ahead)

    async def reserve(self, job: Job) -> int:
        """An offset with room for the job's pixels, as soon as there is some: urgent jobs first,
        then first come first served.
        """
        assert job.nbytes <= self._arena.size, "refused when the picture was opened"
        placed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[job] = placed
        self.admit()
        try:
            return await placed
        except asyncio.CancelledError:
            if placed.done() and not placed.cancelled():
                self.cancel(placed.result())
            raise
        finally:
            if self._waiting.pop(job, None):
                self.admit()

    def admit(self) -> None:
        """Give room to those who wait, in order, until one does not fit.

        To be called whenever room or the order may have changed.
        """
        self._full.clear()
        for job in sorted(self._waiting, key=lambda job: job.turn):
            if self._waiting[job].cancelled():
                continue
            offset = self._place(job)
            if offset is None:
                if job.urgent and not self._writing:
                    self._full.set()
                break
            self._writing[offset] = job
            self._waiting.pop(job).set_result(offset)
        self._metrics.set("saccade_arena_bytes_in_use", self.bytes_in_use)

    async def wait_full(self) -> None:
        """Until a picture that the engine asked for finds no room, and only the engine can make
        some. Says so once for each picture.
        """
        await self._full.wait()
        self._full.clear()

    def cancel(self, offset: int) -> None:
        """A reserved slot will not be filled."""
        del self._writing[offset]
        self._arena.free(offset)
        self.admit()

    def fill(self, key: ImageKey, offset: int, leases: int, ahead: bool = False) -> PixelSlot:
        """A reserved slot now holds the pixels of `key`; `leases` askers wait for them, or they
        were decoded `ahead` of any.
        """
        job = self._writing.pop(offset)
        entry = Entry(PixelSlot(offset, *job.size), leases, ahead)
        self._keys[offset] = key
        self._busy[key] = entry
        self._rest(key)
        self._count_shipped(entry, leases)
        self.admit()
        return entry.slot

    def lease(self, key: ImageKey) -> PixelSlot | None:
        """The slot of `key`, now the engine's until `done`; None when its pixels are not here."""
        if key not in self:
            return None
        entry = self._busy[key] = self._cached.pop(key) if key in self._cached else self._busy[key]
        if not entry.ahead:
            self._metrics.inc("saccade_image_hits_total", level="pixels")
        entry.leases += 1
        entry.ahead = False
        self._count_shipped(entry, 1)
        self.admit()
        return entry.slot

    def done(self, slot: PixelSlot) -> None:
        """The engine has finished with a leased slot."""
        key = self._keys[slot.offset]
        assert key in self._busy and self._busy[key].leases > 0, (
            "the engine gave back a slot it did not hold"
        )
        self._busy[key].leases -= 1
        self._rest(key)
        self.admit()

    def settle(self, key: ImageKey) -> None:
        """No request in flight needs `key` any more: if it was decoded ahead, its slot becomes a
        cached one.
        """
        if key in self._busy:
            self._busy[key].ahead = False
            self._rest(key)
            self.admit()

    def _rest(self, key: ImageKey) -> None:
        """A slot that is nobody's any more becomes the most recently used of the cached ones."""
        if self._busy[key].cached:
            self._cached[key] = self._busy.pop(key)

    @property
    def bytes_in_use(self) -> int:
        """Bytes being written, waiting for the engine, or held by it.

        Cached slots do not count: they make room on demand.
        """
        held = sum(entry.slot.nbytes for entry in self._busy.values())
        return held + sum(job.nbytes for job in self._writing.values())

    def _place(self, job: Job) -> int | None:
        if not job.urgent and self._bytes_ahead() + job.nbytes > self.ahead_limit:
            return None
        while (offset := self._arena.allocate(job.nbytes)) is None:
            entry = self._evict(job.urgent)
            if entry is None:
                return None
            del self._keys[entry.slot.offset]
            self._arena.free(entry.slot.offset)
        return offset

    def _bytes_ahead(self) -> int:
        written = sum(entry.slot.nbytes for entry in self._busy.values() if entry.ahead)
        return written + sum(job.nbytes for job in self._writing.values() if not job.urgent)

    def _evict(self, urgent: bool) -> Entry | None:
        """The least recently used cached slot; for urgent jobs failing that the slot decoded ahead
        last, the one needed last.
        """
        if self._cached:
            return self._cached.pop(next(iter(self._cached)))
        ahead = (key for key, entry in reversed(self._busy.items()) if entry.ahead)
        victim = next(ahead, None) if urgent else None
        return None if victim is None else self._busy.pop(victim)

    def _count_shipped(self, entry: Entry, times: int) -> None:
        self._metrics.inc("saccade_image_bytes_shipped_total", times * entry.slot.nbytes)
