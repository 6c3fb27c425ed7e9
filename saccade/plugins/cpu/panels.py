"""Helpers for matrices that are packed in panels: memory in huge pages, to reduce TLB misses; the
number of panels to pack at a time; and biases padded to full panels.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import cache
from threading import Lock

import torch
from torch.nn import functional as F

HUGE_PAGE_BYTES = 1 << 21
MAPPED_BYTES = 8 * HUGE_PAGE_BYTES
"""Size in bytes of a mapping that small matrices share."""
CACHE_LINE_BYTES = 64
"""Alignment of a matrix in bytes."""
PACKED_VALUES = 1 << 24
"""Maximum number of values to pack at a time, which bounds temporary memory."""


class LargePages:
    """Allocates memory in huge pages. Small matrices share a mapping, one after another.

    A mapping is released with its last matrix, except for the shared mapping in use for the next
    small ones. A large matrix has a separate mapping.
    """

    def __init__(self) -> None:
        self._remaining = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def take(self, size: int) -> torch.Tensor:
        """Return uint8 [size], aligned to a cache line. Raises MemoryError."""
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
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + size]


_PAGES = LargePages()


def empty_words(panels: int, lines: int, width: int) -> torch.Tensor:
    """Allocate int32 [panels, lines, width], aligned to a cache line."""
    # Create the cached zero bias now: within a capture, each replay would fill it again.
    _zeros(panels * width)
    memory = _PAGES.take(panels * lines * width * 4)
    return memory.view(torch.int32).view(panels, lines, width)


def portions_of(panels: int, values: int) -> list[tuple[int, int]]:
    """Divide panels into groups to pack at a time. Returns (first panel, number of panels) for each
    group.

    values: the number of values in a panel.
    """
    count = max(1, PACKED_VALUES // max(1, values))
    return [(first, min(count, panels - first)) for first in range(0, panels, count)]


def padded_bias(bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Return float32 [outputs]: the bias padded with zeros, or only zeros if there is no bias."""
    if bias is None:
        return _zeros(outputs)
    added = bias.float().contiguous()
    return F.pad(added, (0, outputs - len(added))) if outputs > len(added) else added


@cache
def _zeros(outputs: int) -> torch.Tensor:
    return torch.zeros(outputs)
