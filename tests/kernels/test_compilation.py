"""Kernels are compiled abreast, and once more alone where that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton import knobs

from saccade.plugins.gpu.triton import compilation


class Kernel:
    """Fails to compile the first `failures` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.tries = 0

    def preload(self, _data: str) -> None:
        self.tries += 1
        if self.tries <= self.failures:
            raise OSError("another process has the file")


def test_a_kernel_that_fails_beside_others_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [Kernel(0), Kernel(1), Kernel(2)]

    @contextmanager
    def noted() -> Iterator[dict[str, Any]]:
        yield {str(at): (kernel, str(at)) for at, kernel in enumerate(kernels)}

    monkeypatch.setattr(compilation, "_noted", noted)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert compilation.compile_abreast(lambda: None, torch.device("cpu")) == 3
    assert [kernel.tries for kernel in kernels] == [1, 2, 2]


def test_threads_take_the_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.set_device` refuses a device that has none."""
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    kernel = Kernel(0)

    @contextmanager
    def noted() -> Iterator[dict[str, Any]]:
        yield {"one": (kernel, "one")}

    monkeypatch.setattr(compilation, "_noted", noted)
    for device in ("cuda", "cuda:1"):
        compilation.compile_abreast(lambda: None, torch.device(device))
    assert taken and set(taken) == {1} and kernel.tries == 2
