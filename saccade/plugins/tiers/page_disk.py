"""Stores KV pages and sequences' states on disk.

A page is one row of bytes, with the keys and values of its tokens for every layer. Rank 0 writes
the rows of all ranks, concatenated, and broadcasts pages that were read, so that all ranks agree on
the content of the store.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from saccade.core.config import PageTierConfig
from saccade.core.errors import StartupError
from saccade.core.plan import Happened, PageCopy, TierMoves
from saccade.core.store import remove_others
from saccade.parallel import Shard
from saccade.plugins.tiers.background import Background
from saccade.plugins.tiers.host import UNBUFFERED
from saccade.plugins.tiers.items import Pages
from saccade.plugins.tiers.page_parts import PoolParts, by_kind
from saccade.plugins.tiers.store import open_store
from saccade.runtime.tiers import Ready

log = logging.getLogger("saccade")


def open_pages(config: PageTierConfig) -> Background[bytes]:
    """Open the store. Raises StartupError."""
    root = Path(config.folder or "")
    try:
        items = Pages(config.identity)
        store = open_store(config.store, root, items, UNBUFFERED, config.disk_bytes)
        if gone := remove_others(root, config.identity):
            log.info("%s: removed %d files of the model served before", store.what, gone)
        return Background(store)
    except OSError as error:
        raise StartupError(f"--kv-cache-dir {root}: {error.strerror}") from None


class StoredPages:
    """One rank's access to the store of pages, which only rank 0 opens."""

    def __init__(self, config: PageTierConfig, parts: PoolParts, shard: Shard) -> None:
        """Open the store. Raises StartupError."""
        self._store = None if shard.rank else open_pages(config)
        self._parts = parts
        self._shard = shard
        self._reading: set[bytes] = set()
        self._forgotten: set[bytes] = set()  # reads in progress whose pages are no longer needed

    @property
    def found(self) -> tuple[tuple[bytes, int], ...]:
        """The (name, bytes) of each page that an earlier run left, the oldest first."""
        return self._store.store.found if self._store is not None else ()

    def leave(self, moves: TierMoves) -> None:
        if self._store is not None:
            for name in moves.drop:
                self._store.remove(name)
        for state, copies in by_kind(moves.save):
            self._save(copies, state)
        if self._store is not None:
            for name in moves.forget:
                if name in self._reading:
                    self._forgotten.add(name)
                elif self._store.has_read(name):
                    self._store.take_rows(name)

    def come(self, moves: TierMoves) -> None:
        if self._store is not None:
            for copy in moves.fetch:
                if copy.name in self._forgotten:
                    self._forgotten.remove(copy.name)
                    continue
                self._reading.add(copy.name)
                self._store.begin_read(copy.name, self._parts.width(copy.state) * self._shard.size)
        for state, copies in by_kind(moves.place):
            self._place(copies, state)

    @property
    def is_reading(self) -> bool:
        return self._store is not None and self._store.busy

    @property
    def has_events(self) -> bool:
        return self._store is not None and self._store.has_events

    def collect(self) -> list[tuple[bytes, Happened]]:
        events: list[tuple[bytes, Happened]] = []
        if self._store is None:
            return events
        for name, happened in self._store.collect(wait=False):
            if happened != "not saved":
                self._reading.remove(name)
            if happened == "read" and name in self._forgotten:
                self._store.take_rows(name)
            else:
                events.append((name, happened))
            if happened != "not saved":
                self._forgotten.discard(name)
        return events

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _save(self, copies: Sequence[PageCopy], state: bool) -> None:
        rows = self._parts.gather(copies, state)  # [n, bytes]
        if self._shard.size > 1:
            whole = self._shard.all_gather(rows)  # [ranks, n, bytes]
            rows = whole.transpose(0, 1).reshape(len(copies), -1)
        if self._store is None:
            return
        ready: Ready = None
        if rows.is_cuda:
            copied = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            copied.copy_(rows, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            rows = copied
        for copy, row in zip(copies, rows.split(1)):
            self._store.write(copy.name, row, ready)

    def _place(self, copies: Sequence[PageCopy], state: bool) -> None:
        parts = self._parts.of(state)
        if self._parts.device.type == "cpu" and self._shard.size == 1 and self._store is not None:
            # Copy each byte once: allocating an intermediate buffer costs more than the copy.
            for copy in copies:
                row = self._store.take_rows(copy.name)[0].split([part.shape[1] for part in parts])
                for part, values in zip(parts, row, strict=True):
                    part[copy.place] = values
        else:
            self._place_together(copies, state)

    def _place_together(self, copies: Sequence[PageCopy], state: bool) -> None:
        """Write pages that were read to the pool. All ranks must call this together."""
        width, device, ranks = self._parts.width(state), self._parts.device, self._shard.size
        if self._store is not None:
            read = torch.cat(
                [self._store.take_rows(copy.name) for copy in copies]
            )  # [n, ranks * bytes]
            if device.type == "cuda":
                read = read.pin_memory()
            rows = read.to(device, non_blocking=True)
        else:
            rows = torch.empty((len(copies), ranks * width), dtype=torch.uint8, device=device)
        if ranks > 1:
            rows = self._shard.broadcast(rows)[:, self._shard.rank * width :][:, :width]
        self._parts.scatter(copies, state, rows)
