"""Host memory for embeddings: the host tier, and buffers for the way to disk and back.

For a GPU the memory is pinned by a thread, in chunks as it is used, so that start-up
and steps are not blocked. The slabs' bytes are the budget's. On a CPU an embedding stays in place.
Makes no decisions.
"""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.types import ImageKey
from saccade.runtime.tiers import Ready, SameMemory, Tier
from saccade.runtime.vision.streams import Copies, Pinned

BUFFER_BYTES = 256 << 20
"""Maximum bytes of embeddings in flight to or from disk."""
PIECE_BYTES = 1 << 30
"""Bytes pinned per call, which takes a third of a second. No copy spans two registrations."""


class Slab:
    """`capacity` rows of host memory [capacity, width], allocated in runs, from any thread.

    A chunk is pinned before its rows are allocated, if there is time. Otherwise copies are slower.
    """

    def __init__(self, capacity: int, like: torch.Tensor, pin: torch.device | None) -> None:
        """Take the dtype from `like` [.., width]. pin: the GPU that reads and writes by itself."""
        width = like.shape[-1]
        self._rows = max(1, PIECE_BYTES // max(1, width * like.element_size()))  # of a piece
        self._pieces = [
            torch.empty((min(self._rows, capacity - start), width), dtype=like.dtype)
            for start in range(0, capacity, self._rows)
        ]
        self._free = [range(capacity)] if capacity else []  # by start, none next to another
        self._lock = threading.Lock()
        self._pinned: list[Pinned] = []
        self._to_pin = self._pieces[:] if pin is not None else []
        self._wanted: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        if pin is not None:
            work = partial(_pin, self._wanted, self._pinned, partial(Pinned, device=pin))
            threading.Thread(target=work, daemon=True, name="pin").start()
            weakref.finalize(self, self._wanted.put, None)
            self._pin_until(0)

    def _pin_until(self, piece: int) -> None:
        for _ in range(piece + 1 + len(self._to_pin) - len(self._pieces)):
            if self._to_pin:
                self._wanted.put(self._to_pin.pop(0))

    def take_rows(self, count: int, *, whole: bool = False) -> tuple[range, ...] | None:
        """Take `count` rows, in one or more runs. Returns `None` if too few are free.

        whole: take a single run, in a slab with one piece.
        """
        with self._lock:
            fitting = [run for run in self._free if len(run) >= count] if whole else self._free
            if sum(map(len, fitting)) < count:
                return None
            taken: list[range] = []
            for run in list(fitting):
                if not count:
                    break
                self._free.remove(run)
                taken.append(run[:count])
                if rest := run[count:]:
                    insort(self._free, rest, key=lambda run: run.start)
                count -= len(taken[-1])
            if taken:  # the piece behind the last one taken will be next
                self._pin_until(1 + (taken[-1].stop - 1) // self._rows)
            return tuple(taken)

    def give_rows(self, runs: Sequence[range]) -> None:
        """Give rows back for others to take."""
        with self._lock:
            merged: list[range] = []
            for run in sorted((*self._free, *runs), key=lambda run: run.start):
                if merged and merged[-1].stop == run.start:
                    merged[-1] = range(merged[-1].start, run.stop)
                else:
                    merged.append(run)
            self._free = merged

    def views(self, runs: Sequence[range]) -> list[torch.Tensor]:
        """Return views on the runs' rows, one for each piece concerned."""
        found = []
        for run in runs:
            start = run.start
            while start < run.stop:
                piece, at = divmod(start, self._rows)
                end = min(run.stop - start + at, self._rows)
                found.append(self._pieces[piece][at:end])
                start += end - at
        return found


def _pin(
    wanted: SimpleQueue[torch.Tensor | None],
    pinned: list[Pinned],
    pin: Callable[[npt.NDArray[np.uint8]], Pinned],
) -> None:
    while (piece := wanted.get()) is not None:
        pinned.append(pin(piece.view(torch.uint8).view(-1).numpy()))


def open_host(nbytes: int, like: torch.Tensor, copies: Copies | None) -> Tier[ImageKey]:
    """Open the host tier. like: [0, width], on the device. copies: to and from a GPU."""
    if copies is None:
        return SameMemory()
    row = like.shape[1] * like.element_size()
    return PinnedTier(Slab(nbytes // row, like, like.device), copies)


def open_buffers(like: torch.Tensor, copies: Copies | None) -> Buffers | Unbuffered:
    """Open the way between device and disk. Takes what `open_host` does."""
    if copies is None:
        return UNBUFFERED
    row = like.shape[1] * like.element_size()
    return Buffers(Slab(BUFFER_BYTES // row, like, like.device), copies)


class PinnedTier:
    """The host tier for a GPU.

    All copies are in the order of one stream, so a run's rows have been read before the next copy
    into the run begins.
    """

    def __init__(self, slab: Slab, copies: Copies) -> None:
        self._slab = slab
        self._copies = copies
        self._runs: dict[ImageKey, tuple[range, ...]] = {}

    def has(self, key: ImageKey) -> bool:
        return key in self._runs

    def put(self, key: ImageKey, rows: torch.Tensor, ready: Ready) -> None:
        runs = self._slab.take_rows(len(rows))
        assert runs is not None, "the host tier holds more than its budget"
        self._copies.to_host(rows, self._slab.views(runs), ready)
        self._runs[key] = runs

    def get(self, key: ImageKey, _: int) -> tuple[torch.Tensor, Ready]:
        return self._copies.to_device(self._slab.views(self._runs[key]))

    def drop(self, key: ImageKey) -> None:
        self._slab.give_rows(self._runs.pop(key))


class Unbuffered:
    """The way between disk and a CPU, which needs no memory of its own."""

    def lend(self, _: int) -> torch.Tensor | None:
        return None

    def give_rows(self, rows: torch.Tensor) -> None: ...

    def fetch(self, rows: torch.Tensor, ready: Ready) -> tuple[torch.Tensor, Ready]:
        return rows, ready

    def bring(self, rows: torch.Tensor) -> tuple[torch.Tensor, Ready]:
        return rows, None


UNBUFFERED = Unbuffered()


class Buffers:
    """Pinned memory for embeddings between device and disk. It is lent, and released when the
    other side is done.
    """

    def __init__(self, slab: Slab, copies: Copies) -> None:
        self._slab = slab
        self._copies = copies
        self._lent: dict[int, tuple[range, ...]] = {}  # by address
        self._leaving: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    def lend(self, count: int) -> torch.Tensor | None:
        """Lend rows [count, width], or return `None` if all are in use. Any thread may call."""
        runs = self._slab.take_rows(count, whole=True)
        if runs is None:
            return None
        rows = self._slab.views(runs)[0]
        self._lent[rows.data_ptr()] = runs
        return rows

    def give_rows(self, rows: torch.Tensor) -> None:
        """Take back rows, if lent by this memory. Any thread may call."""
        if (runs := self._lent.pop(rows.data_ptr(), None)) is not None:
            self._slab.give_rows(runs)

    def fetch(self, rows: torch.Tensor, ready: Ready) -> tuple[torch.Tensor, Ready]:
        """Begin to copy rows from the device. Returns the copy, and when it is whole.

        Raises BufferError if all memory is in use.
        """
        self._reap()
        copy = self.lend(len(rows))
        if copy is None:
            raise BufferError
        return copy, self._copies.to_host(rows, [copy], ready)

    def bring(self, rows: torch.Tensor) -> tuple[torch.Tensor, Ready]:
        """Copy host rows to the device. They are released once read."""
        self._reap()
        there, ready = self._copies.to_device([rows])
        self._leaving.append((ready, rows))
        return there, ready

    def _reap(self) -> None:
        while self._leaving and self._leaving[0][0].query():
            self.give_rows(self._leaving.pop(0)[1])
