"""The cost of an attack: CPU and memory of the server's processes, and the latency of `/health`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil

PERIOD = 0.05
"""Interval between two samples."""
MAX_HEALTH = 120.0
"""Timeout of a request to /health."""


@dataclass
class Cost:
    """The cost of an attack.

    cpu, memory_before, memory: CPU seconds, and initial and maximum resident memory (MB), by role.
    health: maximum latency of /health in seconds.
    stretch: maximum CPU seconds of the front end's event loop during one /health request, which
        does not depend on the load of other processes.
    healths, failures: number of requests to /health, and of those that failed.
    """

    cpu: dict[str, float] = field(default_factory=dict)
    memory_before: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    health: float = 0.0
    stretch: float = 0.0
    healths: int = 0
    failures: int = 0
    seconds: float = 0.0


def role(process: psutil.Process, front: int) -> str:
    """Return the table's name for a process of the server."""
    if process.pid == front:
        return "front"
    line = " ".join(process.cmdline())
    return "decode" if "saccade.media.workers.supervisor" in line else "engine"


class _Processes(threading.Thread):
    """Samples the processes until `done` is set. Processes of the same role are added up."""

    def __init__(self, pid: int, cost: Cost) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._cost = cost
        self._start: dict[int, tuple[str, float]] = {}
        self._last: dict[int, tuple[str, float]] = {}
        self.done = threading.Event()
        self._look(first=True)

    def run(self) -> None:
        while not self.done.wait(PERIOD):
            self._look()
        self._look()

    def _look(self, first: bool = False) -> None:
        resident: dict[str, float] = {}
        with suppress(psutil.NoSuchProcess):
            front = psutil.Process(self._pid)
            for process in (front, *front.children(recursive=True)):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    name, times = role(process, self._pid), process.cpu_times()
                    spent = times.user + times.system
                    self._start.setdefault(process.pid, (name, spent if first else 0.0))
                    self._last[process.pid] = (name, spent)
                    rss = process.memory_info().rss / 1e6
                    resident[name] = resident.get(name, 0.0) + rss
        if first:
            self._cost.memory_before.update(resident)
        for name, megabytes in resident.items():
            self._cost.memory[name] = max(self._cost.memory.get(name, 0.0), megabytes)
        cpu: dict[str, float] = {}
        for pid, (name, spent) in self._last.items():
            cpu[name] = cpu.get(name, 0.0) + spent - self._start[pid][1]
        self._cost.cpu = cpu


class _Health(threading.Thread):
    """Requests /health on a new connection each time, as a liveness probe does."""

    def __init__(self, url: str, cost: Cost, pid: int) -> None:
        super().__init__(daemon=True)
        split = urlsplit(url)
        self._clock = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self._address = split.hostname or "", split.port
        self._cost = cost
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(PERIOD):
            started, spent = time.monotonic(), self._spent()
            connection = HTTPConnection(*self._address, timeout=MAX_HEALTH)
            try:
                connection.request("GET", "/health")
                right = connection.getresponse().status == 200
            except OSError:
                right = False
            finally:
                connection.close()
            self._cost.stretch = max(self._cost.stretch, self._spent() - spent)
            self._cost.healths += 1
            self._cost.failures += not right
            self._cost.health = max(self._cost.health, time.monotonic() - started)

    def _spent(self) -> float:
        """Return the CPU seconds of the event loop's thread, or 0 if it has exited."""
        with suppress(OSError):
            return int(self._clock.read_text().split()[0]) / 1e9
        return 0.0


@contextmanager
def watching(pid: int, url: str) -> Iterator[Cost]:
    """Yield the cost of the work within the context. It is complete on exit."""
    cost = Cost()
    started = time.monotonic()
    threads = (_Processes(pid, cost), _Health(url, cost, pid))
    for thread in threads:
        thread.start()
    try:
        yield cost
    finally:
        for thread in threads:
            thread.done.set()
        for thread in threads:
            thread.join(MAX_HEALTH + 5)
        cost.seconds = time.monotonic() - started
