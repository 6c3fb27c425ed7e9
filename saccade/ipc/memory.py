"""This process's memory: what native code has allocated, what garbage collection leaves alone, and
what the process may still take: the machine's rest, and what each of its cgroups (version 2)
allows.

The difference of two readings is the share of a library that reports nothing itself. Linux's files
are read anew at each look; missing ones are left out.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""As malloc.h names them."""
MAX_THRESHOLD = 32 << 20
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
    """Return freed memory to the system. A no-op without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def release_pages(address: int, nbytes: int) -> None:
    """Return the whole pages of memory from `address` on, for `nbytes`, to the system.

    They are zeros when they are next read.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def keep_freed(nbytes: int) -> None:
    """Keep up to `nbytes` of freed memory for later use. A no-op without glibc.

    Otherwise each large request gets fresh pages, which the system fills with zeros: half of what a
    seen image costs the front.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, min(nbytes, MAX_THRESHOLD))
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
    """Disable garbage collection, which takes a sixth of the import time and frees almost no
    memory.
    """
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


MACHINE = "the machine"
LIMITS = ("memory.max", "memory.high")
"""A cgroup's limits: where the kernel ends processes, and where it slows them down."""
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Fields of a cgroup's memory.stat: bytes that the kernel takes back when it needs them."""


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory within one bound, in bytes."""

    bound: str  # its name, for people
    total: int
    left: int
    # the percentage of the last ten seconds in which a process waited for memory
    waits: float = 0.0


class MachineMemory:
    """The bounds of this process's memory, found once."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Find the cgroups that have limits. root: the directory of /proc and /sys."""
        self._root = root
        self._groups = [group for group in _groups(root) if _limit(group) is not None]

    def read(self) -> list[MemoryUsage]:
        """Return the room within each bound, the machine's first if it is known."""
        rooms = [self._read_machine(), *map(_read_group, self._groups)]
        return [room for room in rooms if room is not None]

    def _read_machine(self) -> MemoryUsage | None:
        found = _table(self._root / "proc/meminfo")
        if "MemTotal:" not in found or "MemAvailable:" not in found:
            return None
        total, left = 1024 * found["MemTotal:"], 1024 * found["MemAvailable:"]
        return MemoryUsage(MACHINE, total, left, _waits(self._root / "proc/pressure/memory"))


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process's cgroup and of those around it."""
    names = [
        line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line[:3] == "0::"
    ]
    top = root / "sys/fs/cgroup"
    if not names or ".." in names[0].split("/"):  # outside of the mounted hierarchy
        return [top]
    group = top / names[0].strip("/")
    return [group, *(each for each in group.parents if each == top or top in each.parents)]


def _read_group(group: Path) -> MemoryUsage | None:
    limit, used = _limit(group), _text(group / "memory.current")
    if limit is None or not used.strip().isdigit():
        return None
    stat = _table(group / "memory.stat")
    left = limit - int(used) + sum(stat.get(name, 0) for name in RECLAIMABLE)
    return MemoryUsage(f"cgroup {group}", limit, max(0, left), _waits(group / "memory.pressure"))


def _limit(group: Path) -> int | None:
    limits = [_text(group / name).strip() for name in LIMITS]
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)


def _waits(file: Path) -> float:
    """Return the average over ten seconds in which some process waited, in percent."""
    for line in _text(file).splitlines():
        if line.startswith("some avg10="):
            return float(line.removeprefix("some avg10=").split()[0])
    return 0.0


def _table(file: Path) -> Mapping[str, int]:
    """Return the numbers of a file whose lines are `name number`."""
    lines = (line.split() for line in _text(file).splitlines())
    return {each[0]: int(each[1]) for each in lines if len(each) > 1 and each[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
