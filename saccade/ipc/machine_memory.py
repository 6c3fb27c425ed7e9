"""Memory that this process may still take: what the machine has left, and what each of its cgroups
allows (version 2).

Owns nothing. Reads Linux's files anew at each look, and leaves out those that are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MACHINE = "the machine"
LIMITS = ("memory.max", "memory.high")
"""A cgroup's limits: where the kernel ends processes, and where it slows them down."""
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Fields of a cgroup's memory.stat: bytes that the kernel takes back when it needs them."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory within one bound, in bytes. bound: its name, for people.

    waits: the percentage of the last ten seconds in which a process waited for memory.
    """

    bound: str
    total: int
    left: int
    waits: float = 0.0


class MachineMemory:
    """The bounds of this process's memory, found once."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Find the cgroups that have limits. root: where Linux's files lie."""
        self._root = root
        self._groups = [group for group in _groups(root) if _limit(group) is not None]

    def read(self) -> list[Room]:
        """Return the room within each bound, the machine's first if it is known."""
        rooms = [self._read_machine(), *map(_read_group, self._groups)]
        return [room for room in rooms if room is not None]

    def _read_machine(self) -> Room | None:
        found = _table(self._root / "proc/meminfo")
        if "MemTotal:" not in found or "MemAvailable:" not in found:
            return None
        total, left = 1024 * found["MemTotal:"], 1024 * found["MemAvailable:"]
        return Room(MACHINE, total, left, _waits(self._root / "proc/pressure/memory"))


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process's cgroup and of those around it."""
    names = [
        line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line[:3] == "0::"
    ]
    top = root / "sys/fs/cgroup"
    if not names or ".." in names[0].split("/"):  # it lies outside of what is mounted here
        return [top]
    group = top / names[0].strip("/")
    return [group, *(each for each in group.parents if each == top or top in each.parents)]


def _read_group(group: Path) -> Room | None:
    limit, used = _limit(group), _text(group / "memory.current")
    if limit is None or not used.strip().isdigit():
        return None
    stat = _table(group / "memory.stat")
    left = limit - int(used) + sum(stat.get(name, 0) for name in RECLAIMABLE)
    return Room(f"cgroup {group}", limit, max(0, left), _waits(group / "memory.pressure"))


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
