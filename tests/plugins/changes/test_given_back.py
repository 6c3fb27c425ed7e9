"""Memory that is given back and taken again under views of it."""

from __future__ import annotations

import pytest
import torch

from saccade.plugins.changes.given_back import GivenBack


def test_memory_is_given_back_under_views_that_are_whole_again_later() -> None:
    pages, lines = torch.ones(4, 8), torch.ones(2, 16, dtype=torch.uint8)
    view = pages.view(torch.uint8).view(2, -1)
    memory = GivenBack([pages, lines])
    before = memory.nbytes
    memory.give_back("kv_cache")
    memory.give_back("weights")
    assert (memory.nbytes, memory.asleep) == (0, ("kv_cache", "weights"))
    memory.take_back("kv_cache")
    assert (memory.nbytes, memory.asleep) == (before, ("weights",))
    pages.fill_(2.0)
    assert torch.equal(view.view(torch.float32), torch.full((2, 16), 2.0))


def test_where_there_is_no_memory_all_stays_given_back() -> None:
    whole, lent = torch.ones(4), torch.ones(4)
    memory = GivenBack([whole, lent])
    memory.give_back("kv_cache")
    lent.numpy()  # from here on its storage cannot grow
    with pytest.raises(RuntimeError):
        memory.take_back("kv_cache")
    assert (memory.nbytes, memory.asleep) == (0, ("kv_cache",))
