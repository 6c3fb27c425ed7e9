"""KV pages, and sequences' states, in host memory: one rank's part of each, copied while a GPU
works.

Owns the memory and its allotment. Decides nothing. Memory is handed out by the page, and a state
takes several. On a GPU all copies are in the order of one stream: a place has been read before the
next copy into the place begins. A page is read right into its final place in the pool, which stays
untouched by others until `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
import torch

from saccade.core.config import PAGE_PIECE_BYTES, PAGE_PIECES
from saccade.core.plan import PageCopy
from saccade.nn.transfer import send
from saccade.runtime.tiers.host import Slab
from saccade.runtime.tiers.tier import Ready

Parts = Callable[[bool], Sequence[torch.Tensor]]
"""Of states, or pages: of each layer what it keeps, uint8 [n, bytes]."""


class HostPages:
    """`nbytes` for pages, `width` each."""

    def __init__(
        self,
        nbytes: int,
        width: int,
        device: torch.device,
        parts: Parts,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Allocate the memory. stream: for copies. Without one, on a CPU, copies are immediate."""
        like = torch.empty((0, width), dtype=torch.uint8)
        self._slab = Slab(nbytes // width, like, None if stream is None else device)
        self._width = width
        self._device = device
        self._parts = parts
        self._runs: dict[bytes, tuple[range, ...]] = {}
        self._coming: dict[bytes, Ready] = {}  # read, and not yet settled
        self._untold: dict[bytes, Ready] = {}
        self._stream = stream
        self._ring: list[torch.Tensor] = []
        self._leaving: list[torch.cuda.Event] = []  # of each piece of the ring, the last copy

    def drop(self, names: Iterable[bytes]) -> None:
        self._slab.give([run for name in names for run in self._runs.pop(name)])

    def save(self, copies: Sequence[PageCopy]) -> None:
        """Begin to copy these places. The current stream may write to them afterwards."""
        for state in (False, True):
            of_kind = [copy for copy in copies if copy.state == state]
            for piece in self._pieces(of_kind, state):
                self._save(piece, self._parts(state))

    def _pieces(self, copies: Sequence[PageCopy], state: bool) -> Iterable[list[PageCopy]]:
        each = sum(part.shape[1] for part in self._parts(state))
        left, most = iter(copies), max(1, PAGE_PIECE_BYTES // max(1, each))
        return iter(lambda: list(islice(left, most)), [])

    def _save(self, copies: Sequence[PageCopy], parts: Sequence[torch.Tensor]) -> None:
        units = -(-sum(part.shape[1] for part in parts) // self._width)
        taken = self._slab.take(units * len(copies))
        assert taken is not None, "the host tier holds more than its budget"
        left = (row for run in taken for row in run)
        places = send(np.array([copy.place for copy in copies]), self._device)
        rows = torch.cat([part.index_select(0, places) for part in parts], dim=1)  # [n, bytes]
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
        if len(self._leaving) == PAGE_PIECES:  # the memory of those is the device's own again
            current.wait_event(self._leaving.pop(0))
            self._ring.pop(0)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for target, piece in zip(targets, rows.split([len(target) for target in targets])):
                target.copy_(piece, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._ring.append(rows)  # not to be used again before
        self._leaving.append(done)

    def fetch(self, copies: Sequence[PageCopy]) -> None:
        """Begin to read into places in the pool. `collect` reports each end."""
        ready: Ready = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for state in (False, True):
            of_kind = [copy for copy in copies if copy.state == state]
            for piece in self._pieces(of_kind, state):
                if self._stream is None:
                    self._fetch(piece, self._parts(state))
                else:
                    with torch.cuda.stream(self._stream):
                        self._fetch(piece, self._parts(state))
                        ready = torch.cuda.Event()
                        ready.record()
                for copy in piece:
                    self._coming[copy.name] = self._untold[copy.name] = ready

    def _fetch(self, copies: Sequence[PageCopy], parts: Sequence[torch.Tensor]) -> None:
        views = [view for copy in copies for view in self._slab.views(self._runs[copy.name])]
        rows = torch.empty(
            (sum(map(len, views)), self._width), dtype=torch.uint8, device=self._device
        )
        for row, view in zip(rows.split([len(view) for view in views]), views):
            row.copy_(view, non_blocking=True)
        whole = rows.view(len(copies), -1)
        places = send(np.array([copy.place for copy in copies]), self._device)
        start = 0
        for part in parts:
            part.index_copy_(0, places, whole[:, start : start + part.shape[1]])
            start += part.shape[1]

    def settle(self, names: Iterable[bytes]) -> None:
        """Make the current stream's later work wait for these reads."""
        for name in names:
            self._untold.pop(name, None)
            if (ready := self._coming.pop(name, None)) is not None:
                torch.cuda.current_stream(self._device).wait_event(ready)

    def collect(self) -> tuple[bytes, ...]:
        """Return the pages read since the last call."""
        done = tuple(name for name, ready in self._untold.items() if _over(ready))
        for name in done:
            del self._untold[name]
        return done

    @property
    def reading(self) -> bool:
        """Return True until `collect` has reported everything."""
        return bool(self._untold)

    @property
    def told(self) -> bool:
        """Return True if `collect` has something to report."""
        return any(_over(ready) for ready in self._untold.values())


def _over(ready: Ready) -> bool:
    return ready is None or ready.query()


def _runs(rows: Sequence[int]) -> tuple[range, ...]:
    """Join ascending rows into runs."""
    found: list[range] = []
    for row in rows:
        if found and found[-1].stop == row:
            found[-1] = range(found[-1].start, row + 1)
        else:
            found.append(range(row, row + 1))
    return tuple(found)
