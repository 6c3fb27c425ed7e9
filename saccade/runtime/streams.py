"""CUDA streams beside the one that everything else runs on, and host memory that a GPU reads by
itself.

Owns streams and events; knows nothing of what runs on them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger("saccade")


class Lane:
    """A stream for work, and one for copies to the device that must not wait for that work. `with
    lane`: launch work on it.

    Work begins after what the surrounding stream was given before. Who uses its results elsewhere
    waits for an event of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device)
        self._device = device
        self._inner = torch.cuda.stream(self._stream)
        self._uploaded: torch.cuda.Event | None = None

    def __enter__(self) -> Self:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._inner.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._inner.__exit__(*exception)

    def mark(self) -> torch.cuda.Event:
        """A point in the work launched so far, with its time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def upload(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of host tensors on the device, for work on the lane; nobody waits for them but
        that work.
        """
        with torch.cuda.stream(self._copies):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            self._uploaded = torch.cuda.Event()
            self._uploaded.record()
        self._stream.wait_event(self._uploaded)
        for copy in copies:
            copy.record_stream(self._stream)  # their memory is the copying stream's
        return copies

    def wait_uploads(self) -> None:
        """Until the host memory of all uploads may change."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
            self._uploaded = None

    def wait(self) -> None:
        """Until all work on the lane is done."""
        self._stream.synchronize()


class Pinned:
    """Host memory that a GPU reads by itself, as long as this lives.

    What could not be pinned is read more slowly; nothing else changes.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], device: torch.device) -> None:
        with torch.cuda.device(device):
            error = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
            if error:
                logger.warning(
                    "the pixel arena could not be pinned (CUDA error %d): pictures are copied "
                    "to the GPU more slowly",
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
