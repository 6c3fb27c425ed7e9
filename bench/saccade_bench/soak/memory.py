"""Resources of a server's processes: memory by kind, file descriptors, threads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_LINE = re.compile(r"(?P<key>\w+):\s+(?P<kb>\d+) kB|[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)")
MODULES = {"saccade.engine.main": "engine", "saccade.runtime.process": "worker"}


@dataclass
class HeldMemory:
    """The sum over all processes of one name. Sizes are in MB.

    pss: memory in which shared pages are divided among their processes.
    heap: the [heap] segment, which has malloc's main arena.
    anonymous: other memory that is not backed by a file.
    """

    processes: int = 0
    rss: float = 0.0
    pss: float = 0.0
    heap: float = 0.0
    anonymous: float = 0.0
    descriptors: int = 0
    threads: int = 0


def processes(front: int) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the server's processes, each with its name in tables."""
    root = psutil.Process(front)
    yield "front", root
    for process in root.children(recursive=True):
        with suppress(psutil.Error):
            words, name = process.cmdline(), process.name()
            found = next((MODULES[word] for word in words if word in MODULES), None)
            yield found or name.removeprefix("saccade-"), process


def held_by(front: int) -> dict[str, HeldMemory]:
    """Return the current resources of the processes. Processes that exit meanwhile are skipped."""
    found: dict[str, HeldMemory] = {}
    for name, process in processes(front):
        with suppress(OSError, psutil.Error):
            _add(found.setdefault(name, HeldMemory()), process)
    return found


def _add(held: HeldMemory, process: psutil.Process) -> None:
    sizes = _sizes(Path(f"/proc/{process.pid}/smaps").read_text())
    descriptors, threads = process.num_fds(), process.num_threads()
    held.processes += 1
    held.rss += sizes["Rss"]
    held.pss += sizes["Pss"]
    held.heap += sizes["heap"]
    held.anonymous += sizes["anonymous"]
    held.descriptors += descriptors
    held.threads += threads


def _sizes(smaps: str) -> dict[str, float]:
    total = {"Rss": 0.0, "Pss": 0.0, "heap": 0.0, "anonymous": 0.0}
    kind = ""
    for line in smaps.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        key = match["key"]
        if key is None:
            kind = "heap" if match[3] == "[heap]" else "anonymous"
        elif key in ("Rss", "Pss"):
            total[key] += int(match["kb"]) / 1024
        elif key == "Anonymous":
            total[kind] += int(match["kb"]) / 1024
    return total
