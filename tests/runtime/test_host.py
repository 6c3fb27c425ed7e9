"""Host memory for embeddings: handed out in runs, given back whole, by whatever thread."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.runtime.host import Slab

LIKE = torch.empty((0, 2))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30), st.booleans()), max_size=60))
def test_runs_never_overlap_and_nothing_is_lost(asked: list[tuple[bool, int, bool]]) -> None:
    slab = Slab(50, LIKE, None)
    held: list[tuple[range, ...]] = []
    for back, count, whole in asked:
        if back and held:
            slab.give(held.pop(count % len(held)))
            continue
        left = 50 - sum(len(run) for runs in held for run in runs)
        runs = slab.take(count, whole=whole)
        if runs is None:
            assert whole or left < count, "what fits in pieces is never refused"
            continue
        assert sum(map(len, runs)) == count and (len(runs) == 1 or not whole)
        held.append(runs)
        rows = [row for runs in held for run in runs for row in run]
        assert len(rows) == len(set(rows)) and set(rows) <= set(range(50))
    for runs in held:
        slab.give(runs)
    assert slab.take(50, whole=True) == (range(50),)


def test_views_are_the_memory_itself() -> None:
    slab = Slab(10, LIKE, None)
    first, second = slab.take(3), slab.take(4)
    assert first and second
    for part, value in zip((*slab.views(first), *slab.views(second)), (1.0, 2.0)):
        part.fill_(value)
    assert slab.rows[:, 0][:7].tolist() == [1.0] * 3 + [2.0] * 4


def test_a_slab_of_nothing_has_nothing() -> None:
    assert Slab(0, LIKE, None).take(1) is None
