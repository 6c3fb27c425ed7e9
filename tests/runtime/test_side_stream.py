"""Who waits for whom on a GPU: the tower's stream beside the language model's, on a machine without
CUDA. Streams and events write down what they are told.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.runtime.vision.streams import SideStream


class Stub:
    """torch.cuda's streams by name."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []
        self.current = ["main"]
        self._names = iter(["lane", "copies"])

    def stream(self, _device: object = None, priority: int = 0) -> Stream:
        return Stream(next(self._names), self)


class Event:
    def __init__(self, stub: Stub) -> None:
        self.stub, self.name = stub, ""

    def record(self) -> None:
        self.name = f"work of {self.stub.current[-1]}"


class Stream:
    def __init__(self, name: str, stub: Stub) -> None:
        self.name, self.stub = name, stub

    def wait_stream(self, other: Stream) -> None:
        self.stub.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: Event) -> None:
        self.stub.log.append((self.name, "waits for", event.name))

    def __enter__(self) -> None:
        self.stub.current.append(self.name)

    def __exit__(self, *_: object) -> None:
        self.stub.current.pop()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(made))
    monkeypatch.setattr(torch.cuda, "stream", lambda each: each)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: Stream(made.current[-1], made))

    def used(self: torch.Tensor, stream: Any) -> None:
        made.log.append((stream.name, "uses", "a tensor"))

    monkeypatch.setattr(torch.Tensor, "record_stream", used)
    return made


def test_the_tower_waits_for_its_pixels_and_not_for_steps(stub: Stub) -> None:
    side_stream = SideStream(torch.device("cpu"))
    with side_stream:
        pass
    assert stub.log == [("lane", "waits for", "main")], "for weights, once"
    stub.log.clear()
    side_stream.upload([torch.zeros(4)])
    with side_stream:
        assert stub.current[-1] == "lane"
    assert stub.log == [("lane", "waits for", "work of copies"), ("lane", "uses", "a tensor")]


def test_what_the_tower_needs_of_the_surrounding_stream_is_waited_for_once(stub: Stub) -> None:
    side_stream = SideStream(torch.device("cpu"))
    with side_stream:
        pass
    stub.log.clear()
    side_stream.follow()
    for _ in range(2):
        with side_stream:
            pass
    assert stub.log == [("lane", "waits for", "main")]
