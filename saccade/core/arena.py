"""The pixel arena: one bounded region of anonymous shared memory.

The front creates it and hands its descriptor to the nursery of image workers (which copies their
pixels into it; they never have it) and to the workers (who read them). It has no name: when the
last process that holds it has gone, however it went, the memory is gone too. Which bytes hold whose
pixels is for the engine to say (`sched/slots.py`).
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import numpy.typing as npt

from saccade.core.plan import PixelSlot


class Arena:
    """Shared memory of `size` bytes.

    `fd` is inheritable only through `pass_fds`.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._memory = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int) -> Arena:
        """A new arena of at least `size` bytes.

        Memory is committed page by page, as it is first written.
        """
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("saccade-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def attach(cls, fd: int, size: int) -> Arena:
        """The arena behind an inherited descriptor, in another process."""
        return cls(fd, size)

    def view(self, slot: PixelSlot) -> npt.NDArray[np.uint8]:
        """The pixels of a slot, [height, width, 3], without a copy.

        Valid as long as the slot is the caller's.
        """
        flat = np.frombuffer(self._memory, dtype=np.uint8, count=slot.nbytes, offset=slot.offset)
        return flat.reshape(slot.height, slot.width, 3)

    def flat(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the caller's own, without a copy."""
        return memoryview(self._memory)[offset : offset + nbytes]

    def whole(self) -> npt.NDArray[np.uint8]:
        """All of it, for who registers the memory with a device."""
        return np.frombuffer(self._memory, dtype=np.uint8)

    def keep_from_children(self) -> None:
        """Processes that this one forks do not have the memory. (They must not close it.)"""
        self._memory.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Let go of this process's mapping; views that still live keep the memory until they are
        gone.
        """
        with contextlib.suppress(BufferError):
            self._memory.close()
        os.close(self.fd)
