"""Stores KV pages and sequences' states in host memory. Each rank stores its shard, which is copied
while the GPU computes.

Memory is allocated in units of a page, of which a state takes several. On a GPU, all copies run on
one stream, so a row has been read before the next copy overwrites it. A page is read directly into
its slot in the pool. Steps must not access the slot before `_settle` makes them wait for the read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from saccade.core.config import PAGE_PIECE_BYTES, PAGE_PIECES
from saccade.core.plan import Happened, PageCopy, TierMoves
from saccade.plugins.tiers.host import Slab
from saccade.plugins.tiers.page_parts import PoolParts, by_kind
from saccade.runtime.tiers import Ready


class HostPages:
    """The host tier of KV pages, with a budget of `nbytes`."""

    def __init__(self, nbytes: int, parts: PoolParts, stream: torch.cuda.Stream | None) -> None:
        """Allocate the memory.

        stream: the stream for copies on a GPU. If `None`, copies are synchronous.
        """
        self._parts, self._device = parts, parts.device
        self._width = width = parts.width(state=False)
        like = torch.empty((0, width), dtype=torch.uint8)
        self._slab = Slab(nbytes // width, like, None if stream is None else self._device)
        self._runs: dict[bytes, tuple[range, ...]] = {}
        self._coming: dict[bytes, Ready] = {}  # reads that no step waits for yet
        self._untold: dict[bytes, Ready] = {}
        self._stream = stream
        self._ring: list[torch.Tensor] = []
        self._leaving: list[torch.cuda.Event] = []  # the last copy from each entry of the ring

    def leave(self, moves: TierMoves) -> None:
        """Start copying pages from their slots to the tier. Later work on the current stream may
        overwrite the slots.
        """
        self._slab.give_rows([run for name in moves.drop for run in self._runs.pop(name)])
        for state, copies in self._pieces(moves.save):
            self._save(copies, state)
        self._settle(moves.forget)

    def come(self, moves: TierMoves) -> None:
        """Start reading pages into slots of the pool. `collect` reports when each read has
        finished.
        """
        self._settle(copy.name for copy in moves.place)
        if self._stream is not None and moves.fetch:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for state, copies in self._pieces(moves.fetch):
            ready: Ready = None
            with torch.cuda.stream(self._stream):  # `None` keeps the current stream
                self._fetch(copies, state)
                if self._stream is not None:
                    ready = torch.cuda.Event()
                    ready.record()
            for copy in copies:
                self._coming[copy.name] = self._untold[copy.name] = ready

    def _pieces(self, copies: Sequence[PageCopy]) -> Iterable[tuple[bool, list[PageCopy]]]:
        for state, of_kind in by_kind(copies):
            left = iter(of_kind)
            most = max(1, PAGE_PIECE_BYTES // max(1, self._parts.width(state)))
            while piece := list(islice(left, most)):
                yield state, piece

    def _save(self, copies: Sequence[PageCopy], state: bool) -> None:
        units = -(-self._parts.width(state) // self._width)
        taken = self._slab.take_rows(units * len(copies))
        assert taken is not None, "the host tier holds more than its budget"
        left = (row for run in taken for row in run)
        rows = self._parts.gather(copies, state)  # [n, bytes]
        if (short := units * self._width - rows.shape[1]) > 0:
            rows = torch.nn.functional.pad(rows, (0, short))
        targets: list[torch.Tensor] = []
        for copy in copies:
            self._runs[copy.name] = runs = _runs(list(islice(left, units)))
            targets += self._slab.views(runs)
        self._to_host(rows.view(-1, self._width), targets)

    def _to_host(self, rows: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        if self._stream is None:
            for target, piece in zip(targets, rows.split([len(target) for target in targets])):
                target.copy_(piece)
            return
        current = torch.cuda.current_stream(self._device)
        if len(self._leaving) == PAGE_PIECES:  # bound the device memory of copies in flight
            current.wait_event(self._leaving.pop(0))
            self._ring.pop(0)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for target, piece in zip(targets, rows.split([len(target) for target in targets])):
                target.copy_(piece, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._ring.append(rows)  # keeps the memory from being reused during the copy
        self._leaving.append(done)

    def _fetch(self, copies: Sequence[PageCopy], state: bool) -> None:
        views = [view for copy in copies for view in self._slab.views(self._runs[copy.name])]
        shape = (sum(map(len, views)), self._width)
        rows = torch.empty(shape, dtype=torch.uint8, device=self._device)
        for row, view in zip(rows.split([len(view) for view in views]), views):
            row.copy_(view, non_blocking=True)
        self._parts.scatter(copies, state, rows.view(len(copies), -1))

    def _settle(self, names: Iterable[bytes]) -> None:
        """Make later work on the current stream wait for the reads of these pages."""
        for name in names:
            self._untold.pop(name, None)
            if (ready := self._coming.pop(name, None)) is not None:
                torch.cuda.current_stream(self._device).wait_event(ready)

    def collect(self) -> list[tuple[bytes, Happened]]:
        done = [name for name, ready in self._untold.items() if _over(ready)]
        for name in done:
            del self._untold[name]
        return [(name, "read") for name in done]

    @property
    def is_reading(self) -> bool:
        return bool(self._untold)

    @property
    def has_events(self) -> bool:
        return any(_over(ready) for ready in self._untold.values())

    def close(self) -> None: ...


def _over(ready: Ready) -> bool:
    return ready is None or ready.query()


def _runs(rows: Sequence[int]) -> tuple[range, ...]:
    found: list[range] = []
    for row in rows:
        if found and found[-1].stop == row:
            found[-1] = range(found[-1].start, row + 1)
        else:
            found.append(range(row, row + 1))
    return tuple(found)
