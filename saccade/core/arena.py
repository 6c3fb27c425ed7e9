"""The pixel arena: one bounded region of anonymous shared memory.

The front creates the arena and passes its descriptor to the workers, who read pixels. The
supervisor of image workers gets it too and copies pixels in (image workers never hold the arena).
The memory has no name and ends with the last process that holds a descriptor, however the process
ends. The engine decides which bytes hold which pixels (`sched/images/slots.py`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable

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
    def create(cls, size: int, fd: int | None = None) -> Arena:
        """Create an arena with at least `size` bytes, in the memory that `reserve` made, if any.

        The kernel commits memory page by page, at the first write.
        """
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = cls.reserve() if fd is None else fd
        os.ftruncate(fd, size)
        return cls(fd, size)

    @staticmethod
    def reserve() -> int:
        """Return a descriptor of memory without a size, for processes that start before it has
        one.
        """
        return os.memfd_create("saccade-arena", os.MFD_CLOEXEC)

    @classmethod
    def attach(cls, fd: int, size: int | None = None) -> Arena:
        """Open the arena behind an inherited descriptor, in another process."""
        return cls(fd, os.fstat(fd).st_size if size is None else size)

    def view(self, slot: PixelSlot) -> npt.NDArray[np.uint8]:
        """Return a slot's pixels, [height, width, 3], without a copy.

        Valid as long as the slot is the caller's.
        """
        flat = np.frombuffer(self._memory, dtype=np.uint8, count=slot.nbytes, offset=slot.offset)
        return flat.reshape(slot.height, slot.width, 3)

    def flat(self, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes from `offset` on, without a copy. They are the caller's own."""
        return memoryview(self._memory)[offset : offset + nbytes]

    def whole(self) -> npt.NDArray[np.uint8]:
        """Return the whole arena, for registering the memory with a device."""
        return np.frombuffer(self._memory, dtype=np.uint8)

    def release(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Return the memory of ranges (offset, bytes) to the system. They must not be written
        meanwhile.

        Returns how many bytes that were.
        """
        before = os.fstat(self.fd).st_blocks
        for offset, nbytes in ranges:
            start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (offset + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
            if whole > 0:
                self._memory.madvise(mmap.MADV_REMOVE, start, whole)
        return max(0, 512 * (before - os.fstat(self.fd).st_blocks))

    def keep_from_children(self) -> None:
        """Keep the memory from forked processes, which must leave the mapping open."""
        self._memory.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Release this process's mapping. Live views keep the memory until they end."""
        with contextlib.suppress(BufferError):
            self._memory.close()
        os.close(self.fd)
