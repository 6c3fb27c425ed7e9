"""The conditions of a measurement in this process: device, clock, facts for result files.

Owns nothing.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from saccade.core.errors import ConfigError

PACKAGES = ("torch", "transformers", "numpy", "pillow", "simplejpeg", "blake3", "pybase64")
"""Those whose versions figures depend on."""


def pick_device(wanted: Literal["auto", "cpu", "cuda"], threads: int | None) -> torch.device:
    """The device; sets torch's CPU threads if given. Raises ConfigError for a missing device."""
    if threads:
        torch.set_num_threads(threads)
    device = torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and device.type == "cpu":
        raise ConfigError("--device cuda: torch sees no CUDA device")
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """The conditions of the figures, for the head of a result file."""
    names = (
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    cpu = next(names, platform.machine())  # an ARM's has no name
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def where(device: torch.device) -> str:
    """For the title of a table."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )


def run_ms(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, until the device is done with it."""
    wait(device)
    begun = time.perf_counter()
    work()
    wait(device)
    return 1e3 * (time.perf_counter() - begun)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
