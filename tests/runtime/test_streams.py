"""What is said to CUDA about streams and captures, on a machine without it: calls are written down
in their order, and nothing is run.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from saccade.plugins.gpu.cuda.graphs import CudaCapture
from saccade.runtime.vision.streams import FIRST, put_first


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of torch.cuda, without arguments but for priorities."""
    found: list[str] = []

    class Stream:
        def __init__(self, device: object = None, priority: int = 0) -> None:
            found.append(f"stream {priority}")

        def wait_stream(self, other: object) -> None: ...

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            found.append(f"begin {capture_error_mode}")

        def capture_end(self) -> None:
            found.append("end")

        def replay(self) -> None:
            found.append("replay")

    def note(name: str) -> Any:
        return lambda *_: found.append(name)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(None, 9))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    for name in ("empty_cache", "synchronize", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, note(name))
    return found


def test_a_capture_gives_no_memory_back(calls: list[str]) -> None:
    """What PyTorch keeps, the next steps need."""
    capture = CudaCapture(FIRST)
    assert calls == ["stream -1"]
    replay = capture(lambda: calls.append("work"))
    replay()
    told = [each for each in calls if not each.startswith("stream")]
    assert told == ["work", "begin thread_local", "work", "end", "replay"]


def test_a_capture_that_fails_is_ended(calls: list[str]) -> None:
    def work() -> None:
        if "begin thread_local" in calls:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CudaCapture()(work)
    assert calls[-1] == "end"


def test_the_language_model_goes_first(calls: list[str]) -> None:
    put_first(torch.device("cuda"))
    assert calls == ["synchronize", "stream -1", "set_stream"]
