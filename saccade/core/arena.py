"""The pixel arena: a region of anonymous shared memory with a fixed size, through which decoded
images reach the engine.

The front-end process creates the arena and passes its file descriptor to the workers, which read
pixels, and to the supervisor of image workers, which copies pixels into it. Image workers have no
access to it. The memory is freed once the last process with a descriptor has exited, even after a
crash. The engine decides where each image is stored (`sched/images/slots.py`).
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
    """Anonymous shared memory of `size` bytes. A child process inherits `fd` only if the parent
    lists it in `pass_fds`.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._memory = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int, fd: int | None = None) -> Arena:
        """Create an arena of at least `size` bytes. If `fd` is set, use the memory that `reserve`
        returned.

        The kernel commits each page of memory at its first write.
        """
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = cls.reserve() if fd is None else fd
        os.ftruncate(fd, size)
        return cls(fd, size)

    @staticmethod
    def reserve() -> int:
        """Return a file descriptor of empty shared memory. A process can inherit it before its size
        is known.
        """
        return os.memfd_create("saccade-arena", os.MFD_CLOEXEC)

    @classmethod
    def attach(cls, fd: int, size: int | None = None) -> Arena:
        """Map the arena of an inherited file descriptor. `size` defaults to the size of its
        memory.
        """
        return cls(fd, os.fstat(fd).st_size if size is None else size)

    def view(self, slot: PixelSlot) -> npt.NDArray[np.uint8]:
        """Return the pixels of a slot, uint8 [height, width, 3], without a copy.

        The view is valid as long as the slot is allocated.
        """
        flat = np.frombuffer(self._memory, dtype=np.uint8, count=slot.nbytes, offset=slot.offset)
        return flat.reshape(slot.height, slot.width, 3)

    def flat(self, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes at `offset` without a copy. The caller must own this range."""
        return memoryview(self._memory)[offset : offset + nbytes]

    def whole(self) -> npt.NDArray[np.uint8]:
        """Return the entire arena as uint8 [size], for example to register its memory with a
        GPU.
        """
        return np.frombuffer(self._memory, dtype=np.uint8)

    def release(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Release ranges (offset, number of bytes) of the memory to the operating system.

        No process may write to them during the call. Returns the number of bytes released.
        """
        before = os.fstat(self.fd).st_blocks
        for offset, nbytes in ranges:
            start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (offset + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
            if whole > 0:
                self._memory.madvise(mmap.MADV_REMOVE, start, whole)
        return max(0, 512 * (before - os.fstat(self.fd).st_blocks))

    def keep_from_children(self) -> None:
        """Exclude the memory from processes that this one forks. `close` must not be called in
        them.
        """
        self._memory.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Unmap the memory in this process and close `fd`. Existing views keep the memory
        mapped.
        """
        with contextlib.suppress(BufferError):
            self._memory.close()
        os.close(self.fd)
