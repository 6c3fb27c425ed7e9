"""Numbers that a host has made, on their way to a device. Owns nothing."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def send(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `array` to the device for work on the current stream, without making the host wait.

    On a CPU the result is the array's own memory.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # From pageable memory a copy would wait for all that the stream was given before.
    return tensor.pin_memory().to(device, non_blocking=True)
