"""Helpers for measurements: the machine's description, CPU time of processes, and output files."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from saccade.core.errors import ConfigError

PACKAGES = ("torch", "transformers", "numpy", "pillow", "simplejpeg", "blake3", "pybase64")
"""Packages whose versions affect results."""


def describe() -> dict[str, Any]:
    """Describe the machine and the versions of packages, for the header of a result file."""
    names = (
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    cpu = next(names, platform.machine())  # ARM's /proc/cpuinfo has no model name
    found: dict[str, Any] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def make_room(options: object, *names: str) -> None:
    """Create the parent directories of the files in these fields, unless they are None.

    Raises ConfigError if a file cannot be written.
    """
    for name in names:
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        option = f"--{name.replace('_', '-')} {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{option}: its folder cannot be made: {error.strerror}") from None
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{option}: no file can be written there")


class CpuClock:
    """CPU time of this process and of other processes: user and system time of all threads,
    including finished ones.
    """

    def __init__(self, *pids: int) -> None:
        self._clocks = [_clock_of(pid) for pid in (os.getpid(), *pids)]

    def ms(self) -> float:
        """Milliseconds so far, from an arbitrary origin."""
        return sum(map(time.clock_gettime_ns, self._clocks)) / 1e6


def _clock_of(pid: int) -> int:
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise ConfigError(f"the CPU time of process {pid} cannot be read: {os.strerror(error)}")
    return clock.value
