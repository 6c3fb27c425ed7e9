"""What matrices in panels share: memory in large pages, which saves a core looking for pages, how
much is packed at a time, and biases as long as whole panels.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import cache
from threading import Lock

import torch
from torch.nn import functional as F

HUGE_PAGE_BYTES = 1 << 21
"""Bytes of a large page."""
MAPPED_BYTES = 8 * HUGE_PAGE_BYTES
"""Bytes that are asked for at a time, for small matrices that share large pages."""
CACHE_LINE_BYTES = 64
"""Bytes at whose multiples a matrix begins."""
PACKED_VALUES = 1 << 24
"""Values that are packed at a time."""


class LargePages:
    """Memory of which small matrices take their parts one behind another.

    What was mapped goes back to the system with the last matrix in it, but for the newest of small
    ones. A large matrix has memory of its own.
    """

    def __init__(self) -> None:
        self._remaining = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def take(self, size: int) -> torch.Tensor:
        """Return uint8 [size] from the start of a cache line on. Raises MemoryError."""
        if size > MAPPED_BYTES:
            return _map(size)
        with self._lock:
            if size > len(self._remaining):
                self._remaining = _map(MAPPED_BYTES)
            taken = self._remaining[:size]
            self._remaining = self._remaining[-(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES :]
        return taken


def _map(size: int) -> torch.Tensor:
    try:
        mapped = mmap.mmap(-1, size + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes for a matrix") from error
    with suppress(OSError):  # a kernel without large pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + size]


_PAGES = LargePages()


def empty_words(panels: int, lines: int, width: int) -> torch.Tensor:
    """Allocate int32 [panels, lines, width] at the start of a cache line."""
    _zeros(panels * width)  # made here: a recording would repeat it
    memory = _PAGES.take(panels * lines * width * 4)
    return memory.view(torch.int32).view(panels, lines, width)


def portions_of(panels: int, values: int) -> list[tuple[int, int]]:
    """Return (the first, how many) for the panels that are packed at a time. values: of a panel."""
    count = max(1, PACKED_VALUES // max(1, values))
    return [(first, min(count, panels - first)) for first in range(0, panels, count)]


def padded_bias(bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Return float32 [outputs]: the bias, if there is one, and zeros behind it."""
    if bias is None:
        return _zeros(outputs)
    added = bias.float().contiguous()
    return F.pad(added, (0, outputs - len(added))) if outputs > len(added) else added


@cache
def _zeros(outputs: int) -> torch.Tensor:
    return torch.zeros(outputs)
