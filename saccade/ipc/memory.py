"""The memory use of this process and garbage collection, and the memory that is still available on
the machine and in each cgroup (version 2).

To measure a library that does not report its memory use, subtract two readings. Files in /proc and
/sys are read again on each call. Missing files are skipped.
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
"""Parameters of `mallopt`, from malloc.h."""
MAX_THRESHOLD = 32 << 20
"""The maximum value of M_MMAP_THRESHOLD that glibc accepts."""
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Info(ctypes.Structure):
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
    """Return freed memory to the operating system. A no-op without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def release_pages(address: int, nbytes: int) -> None:
    """Return all pages that lie entirely within `nbytes` bytes from `address` to the operating
    system.

    When they are read again, they contain zeros.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)


def resident_bytes() -> int:
    """Return the resident memory of this process (RSS), in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def keep_freed(nbytes: int) -> None:
    """Have malloc keep up to `nbytes` of freed memory for reuse. A no-op without glibc.

    By default, malloc gets new pages for each large allocation, which the kernel fills with zeros.
    Filling pages would be half the cost of a repeated image in the front-end process.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, min(nbytes, MAX_THRESHOLD))
        library.mallopt(M_TRIM_THRESHOLD, nbytes)


def allocated_bytes() -> int:
    """Return the number of bytes that malloc has allocated. The call takes microseconds.

    Returns 0 if the C library does not report this number. glibc reports it from version 2.33 on.
    """
    if _mallinfo is None:
        return 0
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def begin_imports() -> None:
    """Disable garbage collection until `end_imports`.

    Garbage collection would take a sixth of the time of imports, and free almost no memory.
    """
    gc.disable()


def end_imports() -> None:
    """Enable garbage collection again. It skips all objects that exist now."""
    gc.freeze()
    gc.enable()


def settle() -> None:
    """Collect garbage, then exclude all remaining objects from later collections, because they live
    as long as the process.

    Collecting them takes fifty milliseconds or more. In a process that forks, it would also copy
    pages that are otherwise unchanged.
    """
    gc.collect()
    gc.freeze()


MACHINE = "the machine"
LIMITS = ("memory.max", "memory.high")
"""Files with the limits of a cgroup. Beyond memory.max the kernel kills processes. Beyond
memory.high it throttles them.
"""
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Fields in a cgroup's memory.stat that count memory which the kernel can reclaim."""


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The total and the available memory within one limit, in bytes."""

    bound: str  # the machine or a cgroup, whichever has the limit, for messages
    total: int
    left: int
    waits: float = 0.0  # percentage of the last ten seconds in which some process waited for memory


class MachineMemory:
    """Reads how much memory is available on the machine and in the cgroups of this process. The
    cgroups are determined once.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        """Find the cgroups that have memory limits. root: the directory that contains /proc and
        /sys.
        """
        self._root = root
        self._groups = [group for group in _groups(root) if _limit(group) is not None]

    def read(self) -> list[MemoryUsage]:
        """Return the memory use within each limit. If the machine's is known, it is first."""
        rooms = [self._read_machine(), *map(_read_group, self._groups)]
        return [room for room in rooms if room is not None]

    def _read_machine(self) -> MemoryUsage | None:
        found = _table(self._root / "proc/meminfo")
        if "MemTotal:" not in found or "MemAvailable:" not in found:
            return None
        total, left = 1024 * found["MemTotal:"], 1024 * found["MemAvailable:"]
        return MemoryUsage(MACHINE, total, left, _waits(self._root / "proc/pressure/memory"))


def _groups(root: Path) -> list[Path]:
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
    """Return the percentage of the last ten seconds in which some process waited for memory."""
    for line in _text(file).splitlines():
        if line.startswith("some avg10="):
            return float(line.removeprefix("some avg10=").split()[0])
    return 0.0


def _table(file: Path) -> Mapping[str, int]:
    """Return the numbers in a file whose lines have the form `name number`, by name."""
    lines = (line.split() for line in _text(file).splitlines())
    return {each[0]: int(each[1]) for each in lines if len(each) > 1 and each[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
