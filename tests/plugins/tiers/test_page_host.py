"""KV pages in other tiers: bytes come back as they were, from each. From host memory, on a GPU, who
waits for whom: there streams and events write down what they are told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.core.config import PageTierConfig
from saccade.core.plan import PageCopy, TierMoves
from saccade.parallel import UNSHARDED
from saccade.plugins.tiers import host, page_host
from saccade.plugins.tiers.page_disk import StoredPages
from saccade.plugins.tiers.page_host import HostPages
from saccade.plugins.tiers.page_parts import PageTransfers, PoolParts
from tests.runtime.test_side_stream import Event, Stub, stub

__all__ = ["stub"]


def memory(stream: Any = None, pages: int = 4) -> tuple[HostPages, list[torch.Tensor]]:
    parts, tensors = pool()
    return HostPages(6 * pages, parts, stream), tensors


def pool() -> tuple[PoolParts, list[torch.Tensor]]:
    """Two layers of 8 pages, 6 bytes each together, and two lines of a state of 9 bytes."""
    torch.manual_seed(0)
    parts = [torch.randint(0, 256, (8, width), dtype=torch.uint8) for width in (4, 2)]
    lines = torch.randint(0, 256, (2, 9), dtype=torch.uint8)
    return PoolParts(parts, lines), [*parts, lines]


def save(kept: PageTransfers, *copies: PageCopy) -> None:
    kept.leave(TierMoves(save=copies))


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_pages_and_states_come_back_as_they_were(tmp_path: Path, tier: str) -> None:
    """Also where a state lies in parts, between pages that have gone."""
    parts, (keys, values, lines) = pool()
    config = PageTierConfig(str(tmp_path), 1 << 20, b"i" * 16)
    made: dict[str, Callable[[], PageTransfers]] = {
        "host": lambda: HostPages(6 * 5, parts, None),
        "disk": lambda: StoredPages(config, parts, UNSHARDED),
    }
    kept = made[tier]()
    before = keys.clone(), values.clone(), lines.clone()
    save(kept, *(PageCopy(name(page), page) for page in range(4)))
    kept.leave(TierMoves(drop=(name(0), name(2)), save=(PageCopy(name(9), 1, True),)))
    keys.zero_(), values.zero_(), lines.zero_()
    back = PageCopy(name(3), 6), PageCopy(name(1), 7), PageCopy(name(9), 0, True)
    kept.come(TierMoves(fetch=back))
    told = {*kept.collect()}
    while kept.is_reading:
        told |= {*kept.collect()}
    assert told == {(copy.name, "read") for copy in back} and not kept.has_events
    kept.come(TierMoves(place=back))
    for now, then in ((keys, before[0]), (values, before[1])):
        assert torch.equal(now[6:], then[[3, 1]]) and not now[:6].any()
    assert torch.equal(lines[0], before[2][1]) and not lines[1].any()
    kept.leave(TierMoves(drop=tuple(copy.name for copy in back)))
    save(kept, *(PageCopy(name(20 + page), page) for page in range(5)))
    kept.close()


def test_what_leaves_is_copied_beside_the_steps(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "Pinned", lambda *_, **__: None)
    monkeypatch.setattr(page_host, "PAGE_PIECE_BYTES", 6)
    kept, _ = memory(stub.stream(), 8)
    save(kept, *(PageCopy(name(page), page) for page in range(3)))
    assert stub.log == [("lane", "waits for", "main")] * 3, "no step waits for a copy"
    stub.log.clear()
    save(kept, PageCopy(name(4), 4))
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
    save(kept, PageCopy(name(0), 0), PageCopy(name(1), 1))
    stub.log.clear()
    kept.come(TierMoves(fetch=(PageCopy(name(0), 5), PageCopy(name(1), 6))))
    assert stub.log == [("lane", "waits for", "main")], "for what was computed in these pages"
    assert kept.is_reading and not kept.has_events and kept.collect() == []
    stub.log.clear()
    kept.leave(TierMoves(forget=(name(1),)))
    assert stub.log == [("main", "waits for", "work of lane")], "given up: others may write there"
    over.append(True)
    assert kept.collect() == [(name(0), "read")]
    kept.come(TierMoves(place=(PageCopy(name(0), 5),)))
    assert stub.log == [("main", "waits for", "work of lane")] * 2
