"""What a measurement in this process ran on: device, clock, facts for result files. Owns nothing."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from saccade.core.errors import ConfigError


def pick_device(wanted: Literal["auto", "cpu", "cuda"], threads: int | None) -> torch.device:
    """Raises ConfigError where there is none such. Sets torch's CPU threads, where told."""
    if threads:
        torch.set_num_threads(threads)
    device = torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and device.type == "cpu":
        raise ConfigError("--device cuda: torch sees no CUDA device")
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """For the head of a result file."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def where(device: torch.device) -> str:
    """For the title of a table."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


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
