"""Moves KV pages and sequences' states between the pool and other tiers, as plans specify."""

from __future__ import annotations

import torch

from saccade.core.config import PageTierConfig
from saccade.core.plan import PageEvent, PageMoves, PageTier
from saccade.parallel import Shard
from saccade.plugins.tiers.page_disk import StoredPages
from saccade.plugins.tiers.page_host import HostPages
from saccade.plugins.tiers.page_parts import PageTransfers, PoolParts
from saccade.runtime.memory import Caches
from saccade.runtime.states import StateMemory


class PageTierMemory:
    """One rank's shard of the pages in all tiers. Implements `runtime.tiers.PageMemory`."""

    def __init__(
        self,
        caches: Caches,
        page_size: int,
        states: StateMemory | None,
        shard: Shard,
        config: PageTierConfig,
    ) -> None:
        """Open the tiers. Raises StartupError."""
        pages = [
            layer[name].view(torch.uint8).view(len(layer[name]) // page_size, -1)
            for layer in caches
            for name in sorted(layer)
        ]  # each [pages, bytes]
        parts = PoolParts(pages, pages[0].new_empty((0, 0)) if states is None else states.lines)
        self.found: tuple[tuple[bytes, int], ...] = ()
        """The (name, bytes) of each page that an earlier run left, the oldest first."""
        self._tiers: dict[PageTier, PageTransfers] = {}
        if config.host_bytes >= parts.width(state=False):
            gpu = parts.device if parts.device.type == "cuda" else None
            stream = torch.cuda.Stream(gpu) if gpu is not None else None
            self._tiers["host"] = HostPages(config.host_bytes, parts, stream)
        if config.folder is not None:
            stored = StoredPages(config, parts, shard)
            self._tiers["disk"], self.found = stored, stored.found

    def move(self, moves: PageMoves) -> None:
        """Execute the moves of pages in a plan. All ranks must call this together."""
        for tier, each in moves:
            self._tiers[tier].leave(each)
        for tier, each in moves:
            self._tiers[tier].come(each)

    @property
    def is_reading(self) -> bool:
        """Whether a read is in progress, or has finished and awaits `collect`."""
        return any(each.is_reading for each in self._tiers.values())

    @property
    def has_events(self) -> bool:
        """Whether `collect` would return an event."""
        return any(each.has_events for each in self._tiers.values())

    def collect(self) -> tuple[PageEvent, ...]:
        """Return the reads and writes that have finished since the last call, with their
        outcome.
        """
        return tuple(
            (name, happened, tier)
            for tier, each in self._tiers.items()
            for name, happened in each.collect()
        )

    def close(self) -> None:
        """Finish all writes, and close the tiers."""
        for each in self._tiers.values():
            each.close()
