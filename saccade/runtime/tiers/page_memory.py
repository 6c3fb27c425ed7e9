"""KV pages, and sequences' states, on their way to other tiers and back. The scheduler decides,
this file copies. Copies in the host tier are each rank's own (`page_host.py`).

On disk a page is written and read as one row of bytes: each layer's part of the page's tokens. The
first rank writes all ranks' rows side by side, and hands pages read to all, so that all ranks agree
on the disk's content.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from saccade.core.config import PageTierConfig
from saccade.core.errors import StartupError
from saccade.core.page_store import remove_others
from saccade.core.plan import PageCopy, PageEvent, PageMoves, TierMoves
from saccade.nn.transfer import send
from saccade.parallel import Shard
from saccade.runtime.memory import Caches
from saccade.runtime.states import StateMemory
from saccade.runtime.tiers.background import Background
from saccade.runtime.tiers.host import UNBUFFERED
from saccade.runtime.tiers.items import Pages
from saccade.runtime.tiers.page_host import HostPages
from saccade.runtime.tiers.tier import Ready, open_store

log = logging.getLogger("saccade")


def open_pages(config: PageTierConfig, shard: Shard) -> Background[bytes] | None:
    """Open the disk tier, if any, on the first rank. Raises StartupError."""
    if config.folder is None or shard.rank:
        return None
    root = Path(config.folder)
    try:
        items = Pages(config.identity)
        store = open_store(config.store, root, items, UNBUFFERED, config.disk_bytes)
        if gone := remove_others(root, config.identity):
            log.info("%s: %d files of what was served before are removed", store.what, gone)
        return Background(store)
    except OSError as error:
        raise StartupError(f"--kv-cache-dir {root}: {error.strerror}") from None


class PageMemory:
    """One rank's page memory.

    `disk`: the first rank's. It is `None` elsewhere, or without the tier.
    """

    def __init__(
        self,
        caches: Caches,
        page_size: int,
        states: StateMemory,
        shard: Shard,
        disk: Background[bytes] | None,
        host_bytes: int = 0,
    ) -> None:
        """Set up the host tier. `host_bytes`: this rank's."""
        self.disk = disk
        self._shard = shard
        self._pages = [
            layer[name].view(torch.uint8).view(len(layer[name]) // page_size, -1)
            for layer in caches
            for name in sorted(layer)
        ]  # each [pages, bytes]
        self._lines = [states.lines]
        width = sum(part.shape[1] for part in self._pages)
        self._host: HostPages | None = None
        if host_bytes >= width:
            device = self._pages[0].device
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            self._host = HostPages(host_bytes, width, device, self._parts, stream)
        self._reading: set[bytes] = set()
        self._forgotten: set[bytes] = set()  # of these: nobody waits for them any more

    @property
    def found(self) -> tuple[tuple[bytes, int], ...]:
        """(name, bytes) for pages left by an earlier run, the oldest first."""
        return self.disk.store.found if self.disk is not None else ()

    def move(self, moves: PageMoves) -> None:
        """Carry out a plan's work on pages. Every rank must call."""
        if self._host is not None and (host := moves.host):
            self._host.drop(host.drop)
            self._host.save(host.save)
            self._host.settle(host.forget)
            self._host.settle(copy.name for copy in host.place)
        if moves.disk:
            self._move_files(moves.disk)
        if self._host is not None and moves.host.fetch:
            self._host.fetch(moves.host.fetch)

    def _move_files(self, moves: TierMoves) -> None:
        if self.disk is not None:
            for name in moves.drop:
                self.disk.remove(name)
        for state in (False, True):
            if copies := [copy for copy in moves.save if copy.state == state]:
                self._save(copies, self._parts(state))
        if self.disk is not None:
            for name in moves.forget:
                if name in self._reading:
                    self._forgotten.add(name)
                elif self.disk.has_read(name):
                    self.disk.take(name)
            for copy in moves.fetch:
                if copy.name in self._forgotten:
                    self._forgotten.remove(copy.name)
                    continue
                size = sum(part.shape[1] for part in self._parts(copy.state))
                self._reading.add(copy.name)
                self.disk.read(copy.name, size * self._shard.size)
        for state in (False, True):
            if copies := [copy for copy in moves.place if copy.state == state]:
                self._place(copies, self._parts(state))

    @property
    def reading(self) -> bool:
        """Return True while a read is under way, or has ended and awaits `collect`."""
        reads = self._host is not None and self._host.reading
        return reads or (self.disk is not None and self.disk.busy)

    @property
    def told(self) -> bool:
        """Return True if `collect` has something to report."""
        tells = self._host is not None and self._host.told
        return tells or (self.disk is not None and self.disk.told)

    def collect(self) -> tuple[PageEvent, ...]:
        """Return the reads and writes that have ended since the last call."""
        told: list[PageEvent] = []
        disk = self.disk
        if self._host is not None:
            told += ((name, "read", "host") for name in self._host.collect())
        if disk is None:
            return tuple(told)
        for name, happened in disk.collect(wait=False):
            if happened != "not saved":
                self._reading.remove(name)
            if happened == "read" and name in self._forgotten:
                disk.take(name)
            else:
                told.append((name, happened, "disk"))
            if happened != "not saved":
                self._forgotten.discard(name)
        return tuple(told)

    def close(self) -> None:
        """Finish all writing."""
        if self.disk is not None:
            self.disk.close()

    def _parts(self, state: bool) -> list[torch.Tensor]:
        return self._lines if state else self._pages

    def _save(self, copies: Sequence[PageCopy], parts: Sequence[torch.Tensor]) -> None:
        places = send(np.array([copy.place for copy in copies]), parts[0].device)
        rows = torch.cat([part.index_select(0, places) for part in parts], dim=1)  # [n, bytes]
        if self._shard.size > 1:
            whole = self._shard.all_gather(rows)  # [ranks, n, bytes]
            rows = whole.transpose(0, 1).reshape(len(copies), -1)
        if self.disk is None:
            return
        ready: Ready = None
        if rows.is_cuda:
            copied = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            copied.copy_(rows, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            rows = copied
        for copy, row in zip(copies, rows.split(1)):
            self.disk.write(copy.name, row, ready)

    def _place(self, copies: Sequence[PageCopy], parts: Sequence[torch.Tensor]) -> None:
        if parts[0].device.type == "cpu" and self._shard.size == 1 and self.disk is not None:
            # Each byte is copied once: memory that is new costs more than the copy.
            for copy in copies:
                row = self.disk.take(copy.name)[0].split([part.shape[1] for part in parts])
                for part, values in zip(parts, row, strict=True):
                    part[copy.place] = values
        else:
            self._place_together(copies, parts)

    def _place_together(self, copies: Sequence[PageCopy], parts: Sequence[torch.Tensor]) -> None:
        """Place pages on any device and number of ranks. Every rank must call."""
        width = sum(part.shape[1] for part in parts)
        device, ranks = parts[0].device, self._shard.size
        if self.disk is not None:
            read = torch.cat([self.disk.take(copy.name) for copy in copies])  # [n, ranks * bytes]
            if device.type == "cuda":
                read = read.pin_memory()
            rows = read.to(device, non_blocking=True)
        else:
            rows = torch.empty((len(copies), ranks * width), dtype=torch.uint8, device=device)
        if ranks > 1:
            rows = self._shard.broadcast(rows)[:, self._shard.rank * width :][:, :width]
        places = send(np.array([copy.place for copy in copies]), device)
        start = 0
        for part in parts:
            part.index_copy_(0, places, rows[:, start : start + part.shape[1]])
            start += part.shape[1]
