"""Measures the memory of a process and its descendants."""

from __future__ import annotations

import mmap
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def tree_bytes(pid: int) -> int:
    """Return the bytes of memory that `pid` and all its descendants use. Blocks for some
    milliseconds.

    Shared memory is counted once (PSS). If the PSS of a process is not accessible, its unshared
    pages are counted.
    """
    children = defaultdict[int, list[int]](list)
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children[int(fields[1])].append(int(folder.name))
    total, remaining = 0, [pid]
    while remaining:
        process = remaining.pop()
        remaining += children[process]
        with suppress(OSError):
            total += _own_bytes(PROC / str(process))
    return total


def _own_bytes(process: Path) -> int:
    with suppress(PermissionError):
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    _, resident, shared, *_ = (process / "statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE
