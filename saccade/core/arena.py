"""The pixel arena: one bounded region of anonymous shared memory, and who holds which bytes of it.

The front creates it and hands its descriptor to the decode workers (who write pixels) and to the
engine (who reads them). It has no
name: when the last process that holds it has gone, however it went, the memory is gone too. Only
the front allocates. The arena knows offsets and sizes; whose pixels they are, and who waits for
room, is `media/pixels.py`'s business.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import numpy.typing as npt

from saccade.core.plan import PixelSlot

ALIGNMENT = 4096
"""Slots start on a page, so that no two pictures share one."""


class Arena:
    """Shared memory of `size` bytes with a first-fit allocator.

    `fd` is inheritable only through `pass_fds`.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._memory = mmap.mmap(fd, size)
        self._holes = {0: size}  # offset -> length; kept in order of offsets, neighbours merged
        self._taken: dict[int, int] = {}  # offset -> length

    @classmethod
    def create(cls, size: int) -> Arena:
        """A new arena of at least `size` bytes.

        Memory is committed page by page, as it is first written.
        """
        size = _aligned(size)
        fd = os.memfd_create("saccade-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def attach(cls, fd: int, size: int) -> Arena:
        """The arena behind an inherited descriptor, in another process: read and write its slots,
        leave allocation to the creator.
        """
        return cls(fd, size)

    def allocate(self, nbytes: int) -> int | None:
        """The offset of `nbytes` fresh bytes, or None while no hole is large enough."""
        wanted = _aligned(nbytes)
        offset = next((at for at, length in self._holes.items() if length >= wanted), None)
        if offset is None:
            return None
        length = self._holes.pop(offset)
        if length > wanted:
            self._add_hole(offset + wanted, length - wanted)
        self._taken[offset] = wanted
        return offset

    def free(self, offset: int) -> None:
        """Give back what `allocate` returned."""
        length = self._taken.pop(offset)
        for at, hole in list(self._holes.items()):
            if at + hole == offset:
                del self._holes[at]
                offset, length = at, hole + length
            elif at == offset + length:
                del self._holes[at]
                length += hole
        self._add_hole(offset, length)

    def _add_hole(self, offset: int, length: int) -> None:
        self._holes[offset] = length
        self._holes = dict(sorted(self._holes.items()))

    @property
    def in_use(self) -> int:
        """Bytes allocated, rounded up to whole pages."""
        return sum(self._taken.values())

    def view(self, slot: PixelSlot) -> npt.NDArray[np.uint8]:
        """The pixels of a slot, [height, width, 3], without a copy.

        Valid as long as the slot is the caller's.
        """
        flat = np.frombuffer(self._memory, dtype=np.uint8, count=slot.nbytes, offset=slot.offset)
        return flat.reshape(slot.height, slot.width, 3)

    def whole(self) -> npt.NDArray[np.uint8]:
        """All of it, for who registers the memory with a device."""
        return np.frombuffer(self._memory, dtype=np.uint8)

    def close(self) -> None:
        """Let go of this process's mapping; views that still live keep the memory until they are
        gone.
        """
        with contextlib.suppress(BufferError):
            self._memory.close()
        os.close(self.fd)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
