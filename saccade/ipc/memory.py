"""This process's memory: what native code has allocated, and what garbage collection leaves alone.

The difference of two readings is the share of a library that reports nothing itself.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import cast

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""As malloc.h names them."""
LARGEST_THRESHOLD = 32 << 20
"""The most that glibc takes for M_MMAP_THRESHOLD."""
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def _find() -> Callable[[], _Info] | None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    function = library.mallinfo2
    function.restype = _Info
    return cast(Callable[[], _Info], function)


_mallinfo = _find()


def trim() -> None:
    """Give the system what was freed between other allocations. Does nothing without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def give_back(address: int, nbytes: int) -> None:
    """Return the whole pages of memory from `address` on, for `nbytes`, to the system.

    They are zeros when they are next read.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)


def resident_bytes() -> int:
    """Return the bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def keep_freed(nbytes: int) -> None:
    """Keep up to `nbytes` of freed memory for later use. Does nothing without glibc.

    Otherwise each large request gets fresh pages, which the system fills with zeros: half of what a
    seen image costs the front.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, min(nbytes, LARGEST_THRESHOLD))
        library.mallopt(M_TRIM_THRESHOLD, nbytes)


def allocated_bytes() -> int:
    """Return the bytes in use in all of malloc's arenas and mappings. Takes microseconds.

    Returns 0 unless the C library reports it (glibc from 2.33 on).
    """
    if _mallinfo is None:
        return 0
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def begin_imports() -> None:
    """Stop collections, which take a sixth of the time of imports and find next to nothing."""
    gc.disable()


def end_imports() -> None:
    """Resume collections, which leave what is there now alone."""
    gc.freeze()
    gc.enable()


def settle() -> None:
    """Exclude all current objects from future garbage collections.

    They live as long as the process. A collection over them takes fifty milliseconds and more, and
    in a forking process copies pages that are otherwise unchanged.
    """
    gc.collect()
    gc.freeze()
