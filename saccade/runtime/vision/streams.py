"""CUDA streams in addition to the main stream, timing of their work, and pinned host memory.
Imported only for GPUs.
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
"""The priority of the language model's stream. Other streams have 0, the lowest priority."""


def put_first(device: torch.device) -> None:
    """Give work that this thread launches from now on priority over other streams.

    A decode step then does not wait for the vision encoder to end, but uses multiprocessors as soon
    as they become free.
    """
    torch.cuda.synchronize(device)  # wait for earlier work, such as copies of weights
    torch.cuda.set_stream(torch.cuda.Stream(device, priority=FIRST))


class SideStream:
    """A stream for background work, and another stream for copies to the device that need not wait
    for this work.

    Work is launched on it inside `with side_stream:`. It waits for its uploads and for earlier work
    on the side stream, but for the surrounding stream only after `follow`. To use its results on
    another stream, record an event on the side stream and wait for this event.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device)
        self._device = device
        self._inner = torch.cuda.stream(self._stream)
        self._follows = True  # the first work waits for copies of weights and buffers

    def follow(self) -> None:
        """Make the next work on the side stream wait for all current work on the surrounding
        stream.
        """
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
        """Copy host tensors to the device. Only work on the side stream waits for the copies."""
        with torch.cuda.stream(self._copies):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            uploaded = torch.cuda.Event()
            uploaded.record()
        self._stream.wait_event(uploaded)
        for copy in copies:
            copy.record_stream(self._stream)  # allocated on the copying stream
        return copies

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the side stream's next work use tensors that the surrounding stream computes."""
        self.follow()
        for tensor in tensors:
            tensor.record_stream(self._stream)  # allocated on the surrounding stream

    def wait(self) -> None:
        """Wait until all work on the side stream is done."""
        self._stream.synchronize()


class StreamStopwatch:
    """Like `vision_encoder.Stopwatch`, but measures work on the current stream without waiting for
    it.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> Self:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._marks.append((begin, end))
        return self

    def __exit__(self, *exception: object) -> None:
        self.last.record()

    @property
    def last(self) -> torch.cuda.Event:
        """The CUDA event at the end of the last part."""
        return self._marks[-1][1]

    def done(self) -> bool:
        """Return True if the last part has finished."""
        return self.last.query()

    def read(self) -> tuple[float, float]:
        """Wait until the work has finished. Return the time of all parts in milliseconds, and
        `time.monotonic()`.
        """
        self.last.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._marks), time.monotonic()


class Copies:
    """Copies embeddings between host and device in order, on a separate stream.

    Only users of a copy wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    def to_host(
        self, rows: torch.Tensor, parts: Sequence[torch.Tensor], ready: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        """Copy rows [n, width] into consecutive pinned `parts`.

        Returns the event that is recorded at the end of the copy.

        ready: the event that another stream records once it has computed the rows, or None if the
            current stream computes them.
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
        rows.record_stream(self._stream)  # do not reuse the memory before the copy has ended
        return done

    def to_device(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Copy host `parts` to the device, concatenated.

        Returns the rows, and the event that is recorded at the end of the copy.
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
    """Pins host memory for as long as the object exists, so that a GPU can read it directly.

    If the memory cannot be pinned, copies still work, but are slower.
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
                ):  # clear the error, which CUDA would report again for the next kernel
                    torch.zeros(1, device=device).add_(1)
                return
        # Unpin the memory before it is unmapped, or the next mapping at its address cannot be
        # pinned.
        weakref.finalize(self, _unpin, memory).atexit = False


def _unpin(memory: npt.NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
