"""KV pages in host memory: bytes come back as they were, and, on a GPU, who waits for whom. There
streams and events write down what they are told.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.core.plan import PageCopy
from saccade.runtime.tiers import host, page_host
from saccade.runtime.tiers.page_host import HostPages
from tests.runtime.test_side_stream import Event, Stub, stub

__all__ = ["stub"]
CPU = torch.device("cpu")


def memory(stream: Any = None, pages: int = 4) -> tuple[HostPages, list[torch.Tensor]]:
    """Two layers of 8 pages, 6 bytes each together, and two lines of a state of 9 bytes."""
    torch.manual_seed(0)
    parts = [torch.randint(0, 256, (8, width), dtype=torch.uint8) for width in (4, 2)]
    lines = [torch.randint(0, 256, (2, 9), dtype=torch.uint8)]
    kept = HostPages(6 * pages, 6, CPU, lambda state: lines if state else parts, stream)
    return kept, [*parts, *lines]


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_pages_and_states_come_back_as_they_were() -> None:
    """Also where a state lies in parts, between pages that have gone."""
    kept, (keys, values, lines) = memory(pages=5)
    before = keys.clone(), values.clone(), lines.clone()
    kept.save([PageCopy(name(page), page) for page in range(4)])
    kept.drop([name(0), name(2)])
    kept.save([PageCopy(name(9), 1, True)])
    keys.zero_(), values.zero_(), lines.zero_()
    kept.fetch([PageCopy(name(3), 6), PageCopy(name(1), 7), PageCopy(name(9), 0, True)])
    assert kept.told and set(kept.collect()) == {name(3), name(1), name(9)}
    assert not kept.reading
    kept.settle([name(3), name(1), name(9)])
    for now, then in ((keys, before[0]), (values, before[1])):
        assert torch.equal(now[6:], then[[3, 1]]) and not now[:6].any()
    assert torch.equal(lines[0], before[2][1]) and not lines[1].any()
    kept.drop([name(1), name(3), name(9)])
    kept.save([PageCopy(name(20 + page), page) for page in range(5)])


def test_what_leaves_is_copied_beside_the_steps(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "Pinned", lambda *_, **__: None)
    monkeypatch.setattr(page_host, "PAGE_PIECE_BYTES", 6)
    kept, _ = memory(stub.stream(), 8)
    kept.save([PageCopy(name(page), page) for page in range(3)])
    assert stub.log == [("lane", "waits for", "main")] * 3, "no step waits for a copy"
    stub.log.clear()
    kept.save([PageCopy(name(4), 4)])
    assert stub.log == [("main", "waits for", "work of lane"), ("lane", "waits for", "main")], (
        "but for the memory that it is copied through"
    )


def test_what_comes_back_is_waited_for_where_it_is_used(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "Pinned", lambda *_, **__: None)
    over: list[bool] = []
    monkeypatch.setattr(Event, "query", lambda _: bool(over), raising=False)
    kept, _ = memory(stub.stream())
    kept.save([PageCopy(name(0), 0), PageCopy(name(1), 1)])
    stub.log.clear()
    kept.fetch([PageCopy(name(0), 5), PageCopy(name(1), 6)])
    assert stub.log == [("lane", "waits for", "main")], "for what was computed in these pages"
    assert kept.reading and not kept.told and kept.collect() == ()
    stub.log.clear()
    kept.settle([name(1)])
    assert stub.log == [("main", "waits for", "work of lane")], "given up: others may write there"
    over.append(True)
    assert kept.collect() == (name(0),)
    kept.settle([name(0)])
    assert stub.log == [("main", "waits for", "work of lane")] * 2
