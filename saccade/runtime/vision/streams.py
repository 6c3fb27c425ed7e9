"""CUDA streams beside the main stream, and host memory that a GPU reads by itself.

Owns streams and events; knows nothing of the work on streams.
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
    """This thread's later launches go before other streams' work: a decoding step takes
    multiprocessors from the tower as they become free. On a CPU nothing.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what was launched before, such as copies of weights
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=FIRST))


class Lane:
    """A stream for work, and one for copies to the device that must not wait for the work. `with
    lane`: launch work on it.

    Work waits for its uploads and for work on the lane before it, not for the surrounding stream,
    except after `follow`. Users of results elsewhere wait for an event of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device)
        self._device = device
        self._inner = torch.cuda.stream(self._stream)
        self._follows = True  # weights, buffers

    def follow(self) -> None:
        """The surrounding stream's work so far comes before the lane's next work."""
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
        """Copies of host tensors on the device, for work on the lane; only the lane's work waits
        for copies.
        """
        with torch.cuda.stream(self._copies):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            uploaded = torch.cuda.Event()
            uploaded.record()
        self._stream.wait_event(uploaded)
        for copy in copies:
            copy.record_stream(self._stream)  # their memory is the copying stream's
        return copies

    def wait(self) -> None:
        """Until all work on the lane is done."""
        self._stream.synchronize()


class Stopwatch:
    """The time of work in any number of parts: `with stopwatch` around each part.

    On a device, of the current stream's work, without a wait for the end.
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
        """The end of the last part, on a device."""
        return self._marks[-1][1]

    def done(self) -> bool:
        """True if the last part has ended."""
        return not self._on_device or self.last.query()

    def read(self) -> tuple[float, float]:
        """The ms of all parts, and `time.monotonic()` at the end of the last, or at its first
        sight. Waits for the end.
        """
        if not self._on_device:
            return 1e3 * self._seconds, self._ended
        self.last.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._marks), time.monotonic()


class Copies:
    """A stream for copies of embeddings between host and device, awaited only by users of the
    embeddings. Copies are made in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    def to_host(
        self, rows: torch.Tensor, parts: Sequence[torch.Tensor], ready: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        """Copy rows [n, width] into pinned `parts`, back to back. Returns when done.

        ready: the end of another stream's making of rows; None: made on the current stream.
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
        """Copies of host `parts`, back to back, and the event of their end."""
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

    Memory that could not be pinned is read more slowly; nothing else changes.
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
