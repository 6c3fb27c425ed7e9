"""CPU time of whole processes, exact to the scheduler.

Owns nothing; knows nothing of the work.
"""

from __future__ import annotations

import ctypes
import os
import time

from saccade.core.errors import ConfigError


class CpuClock:
    """CPU time of this process and of other processes together: user and system, all threads, ended
    threads included.
    """

    def __init__(self, *pids: int) -> None:
        self._clocks = [_clock_of(pid) for pid in (os.getpid(), *pids)]

    def ms(self) -> float:
        """Milliseconds so far; only differences count."""
        return sum(map(time.clock_gettime_ns, self._clocks)) / 1e6


def _clock_of(pid: int) -> int:
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise ConfigError(f"the CPU time of process {pid} cannot be read: {os.strerror(error)}")
    return clock.value
