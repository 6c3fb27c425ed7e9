"""CUDA streams next to the main stream, and host memory that a GPU reads by itself.

Owns streams and events.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger("saccade")

FIRST = -1
"""Priority of the language model's work. Other streams have 0, which is the lowest."""


def put_first(device: torch.device) -> None:
    """Put this thread's later launches before other streams' work. A no-op on a CPU.

    A decoding step then takes multiprocessors from the tower as they become free.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what was launched before, such as copies of weights
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=FIRST))


class SideStream:
    """A stream for work, and one for copies to the device that need not wait for the work.

    Launch work on it within `with side_stream`. Work waits for its uploads and for earlier work on
    the side stream. It waits for the surrounding stream only after `follow`. Users of results
    elsewhere wait for an event on the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device)
        self._device = device
        self._inner = torch.cuda.stream(self._stream)
        self._follows = True  # weights, buffers

    def follow(self) -> None:
        """Make the side stream's next work wait for the surrounding stream's work so far."""
        self._follows = True

    def __enter__(self) -> Self:
        if self._follows:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._follows = False
        self._inner.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._inner.__exit__(*exception)

    def upload(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy host tensors to the device, for work on the side stream. Only the side stream's work
        waits for the copies.
        """
        with torch.cuda.stream(self._copies):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            uploaded = torch.cuda.Event()
            uploaded.record()
        self._stream.wait_event(uploaded)
        for copy in copies:
            copy.record_stream(self._stream)  # their memory is the copying stream's
        return copies

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over tensors that the surrounding stream makes, for the next work."""
        self.follow()
        for tensor in tensors:
            tensor.record_stream(self._stream)  # their memory is the surrounding stream's

    def wait(self) -> None:
        """Wait until all work on the side stream is done."""
        self._stream.synchronize()


class Stopwatch:
    """Measures the time of work in any number of parts: `with stopwatch` around each part.

    On a device, measures the current stream's work without waiting for its end.
    """

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun = 0.0
        self._seconds = 0.0
        self._ended = 0.0

    def __enter__(self) -> Self:
        if self._on_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._marks.append((begin, end))
        self._begun = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._on_device:
            self._marks[-1][1].record()
        self._ended = time.monotonic()
        self._seconds += self._ended - self._begun

    @property
    def last(self) -> torch.cuda.Event:
        """The event that ends the last part, on a device."""
        return self._marks[-1][1]

    def done(self) -> bool:
        """Return True if the last part has ended."""
        return not self._on_device or self.last.query()

    def read(self) -> tuple[float, float]:
        """Wait for the end. Returns the ms of all parts and `time.monotonic()` at the end.

        On a device, the end is when it is first seen.
        """
        if not self._on_device:
            return 1e3 * self._seconds, self._ended
        self.last.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._marks), time.monotonic()


class Copies:
    """A stream for copies of embeddings between host and device, awaited only by their users.

    Copies are made in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    def to_host(
        self, rows: torch.Tensor, parts: Sequence[torch.Tensor], ready: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        """Copy rows [n, width] into pinned `parts`, back to back. Returns the event that ends the
        copy.

        ready: another stream's event that ends the making of rows. Without it, the current stream
        makes them.
        """
        if ready is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            for part, piece in zip(parts, rows.split([len(part) for part in parts])):
                part.copy_(piece, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        rows.record_stream(self._stream)  # not to be used again before
        return done

    def to_device(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Copy host `parts` to the device, back to back. Returns the rows and the event that ends
        the copy.
        """
        with torch.cuda.stream(self._stream):
            shape = (sum(map(len, parts)), parts[0].shape[1])
            rows = torch.empty(shape, dtype=parts[0].dtype, device=self._device)
            for part, piece in zip(parts, rows.split([len(part) for part in parts])):
                piece.copy_(part, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return rows, done


class Pinned:
    """Host memory that a GPU reads by itself, for the object's life.

    Memory that could not be pinned works as well, and is read more slowly.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], device: torch.device) -> None:
        with torch.cuda.device(device):
            error = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
            if error:
                logger.warning(
                    "host memory could not be pinned (CUDA error %d): copies between it and the "
                    "GPU are slower",
                    error,
                )
                with suppress(
                    RuntimeError
                ):  # CUDA would report the same error again, for the next kernel
                    torch.zeros(1, device=device).add_(1)
                return
        # The memory must not be unmapped before: the next mapping at its place could not be pinned.
        weakref.finalize(self, _unpin, memory).atexit = False


def _unpin(memory: npt.NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
