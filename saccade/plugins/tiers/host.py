"""Host memory for embeddings: the host tier, and the buffers between the GPU and the disk.

For a GPU, a thread pins the memory chunk by chunk as it is used, so that neither start-up nor steps
are blocked. A slab counts in full against the budget, even while parts of it are free. With a model
on a CPU, embeddings are used without a copy.
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
"""Bytes that are pinned per call, which takes about 0.3 s. A single copy never spans two chunks of
this size.
"""


class Slab:
    """Host memory for `capacity` rows, [capacity, width], which are allocated in contiguous runs.
    This class is thread-safe.

    A chunk is usually pinned before its rows are allocated. Until then, copies are slower.
    """

    def __init__(self, capacity: int, like: torch.Tensor, pin: torch.device | None) -> None:
        """Reserve rows with the dtype and width of `like` [.., width].

        pin: the GPU to pin the memory for.
        """
        width = like.shape[-1]
        self._rows = max(1, PIECE_BYTES // max(1, width * like.element_size()))  # per chunk
        self._pieces = [
            torch.empty((min(self._rows, capacity - start), width), dtype=like.dtype)
            for start in range(0, capacity, self._rows)
        ]
        self._free = [range(capacity)] if capacity else []  # sorted by start, never adjacent
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
        """Allocate `count` rows in one or more runs. Returns `None` if too few rows are free.

        whole: allocate a single run. This requires a slab of one chunk.
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
            if taken:  # pin the next chunk in advance
                self._pin_until(1 + (taken[-1].stop - 1) // self._rows)
            return tuple(taken)

    def give_rows(self, runs: Sequence[range]) -> None:
        """Release rows, and merge them with adjacent free runs."""
        with self._lock:
            merged: list[range] = []
            for run in sorted((*self._free, *runs), key=lambda run: run.start):
                if merged and merged[-1].stop == run.start:
                    merged[-1] = range(merged[-1].start, run.stop)
                else:
                    merged.append(run)
            self._free = merged

    def views(self, runs: Sequence[range]) -> list[torch.Tensor]:
        """Return views of the runs' rows. A run that spans chunks has one view per chunk."""
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
    """Open the host tier.

    like: an empty tensor [0, width] with the embeddings' dtype and device.
    copies: copies rows to and from a GPU. None on a CPU.
    """
    if copies is None:
        return SameMemory()
    row = like.shape[1] * like.element_size()
    return PinnedTier(Slab(nbytes // row, like, like.device), copies)


def open_buffers(like: torch.Tensor, copies: Copies | None) -> Buffers | Unbuffered:
    """Open the buffers between the device and the disk. The arguments are the same as in
    `open_host`.
    """
    if copies is None:
        return UNBUFFERED
    row = like.shape[1] * like.element_size()
    return Buffers(Slab(BUFFER_BYTES // row, like, like.device), copies)


class PinnedTier:
    """The host tier for a GPU.

    All copies run on one stream, so the rows of a run have been read before the next copy
    overwrites them.
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
    """Replaces `Buffers` on a CPU, where rows that were read from disk are used without a copy."""

    def lend(self, _: int) -> torch.Tensor | None:
        return None

    def give_rows(self, rows: torch.Tensor) -> None: ...

    def fetch(self, rows: torch.Tensor, ready: Ready) -> tuple[torch.Tensor, Ready]:
        return rows, ready

    def bring(self, rows: torch.Tensor) -> tuple[torch.Tensor, Ready]:
        return rows, None


UNBUFFERED = Unbuffered()


class Buffers:
    """A pool of pinned memory for embeddings between the device and the disk.

    Rows are lent, and must be released once they have been written or copied.
    """

    def __init__(self, slab: Slab, copies: Copies) -> None:
        self._slab = slab
        self._copies = copies
        self._lent: dict[int, tuple[range, ...]] = {}  # by address
        self._leaving: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    def lend(self, count: int) -> torch.Tensor | None:
        """Lend rows [count, width], or return `None` if too few are free. This method is
        thread-safe.
        """
        runs = self._slab.take_rows(count, whole=True)
        if runs is None:
            return None
        rows = self._slab.views(runs)[0]
        self._lent[rows.data_ptr()] = runs
        return rows

    def give_rows(self, rows: torch.Tensor) -> None:
        """Release rows. Rows that this pool did not lend are ignored. This method is
        thread-safe.
        """
        if (runs := self._lent.pop(rows.data_ptr(), None)) is not None:
            self._slab.give_rows(runs)

    def fetch(self, rows: torch.Tensor, ready: Ready) -> tuple[torch.Tensor, Ready]:
        """Start copying rows from the device. Returns the copy, and the event that marks its end.

        Raises BufferError if too few rows are free.
        """
        self._reap()
        copy = self.lend(len(rows))
        if copy is None:
            raise BufferError
        return copy, self._copies.to_host(rows, [copy], ready)

    def bring(self, rows: torch.Tensor) -> tuple[torch.Tensor, Ready]:
        """Start copying host rows to the device, and release them when the copy has finished.

        Returns the copy, and the event that marks its end.
        """
        self._reap()
        there, ready = self._copies.to_device([rows])
        self._leaving.append((ready, rows))
        return there, ready

    def _reap(self) -> None:
        while self._leaving and self._leaving[0][0].query():
            self.give_rows(self._leaving.pop(0)[1])
