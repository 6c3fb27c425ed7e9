"""Host memory for embeddings: handed out in runs, given back whole, by whatever thread."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.plugins.tiers import host
from saccade.plugins.tiers.host import Slab

LIKE = torch.empty((0, 2))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30), st.booleans()), max_size=60))
def test_runs_never_overlap_and_nothing_is_lost(asked: list[tuple[bool, int, bool]]) -> None:
    slab = Slab(50, LIKE, None)
    held: list[tuple[range, ...]] = []
    for back, count, whole in asked:
        if back and held:
            slab.give_rows(held.pop(count % len(held)))
            continue
        left = 50 - sum(len(run) for runs in held for run in runs)
        runs = slab.take_rows(count, whole=whole)
        if runs is None:
            assert whole or left < count, "what fits in pieces is never refused"
            continue
        assert sum(map(len, runs)) == count and (len(runs) == 1 or not whole)
        held.append(runs)
        rows = [row for runs in held for run in runs for row in run]
        assert len(rows) == len(set(rows)) and set(rows) <= set(range(50))
    for runs in held:
        slab.give_rows(runs)
    assert slab.take_rows(50, whole=True) == (range(50),)


def test_views_are_the_memory_itself() -> None:
    slab = Slab(10, LIKE, None)
    first, second = slab.take_rows(3), slab.take_rows(4)
    assert first and second
    for part, value in zip((*slab.views(first), *slab.views(second)), (1.0, 2.0)):
        part.fill_(value)
    (all_of_it,) = slab.views([range(7)])
    assert all_of_it[:, 0].tolist() == [1.0] * 3 + [2.0] * 4


def test_a_piece_is_pinned_before_it_is_used_and_not_before_the_one_in_front_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(host, "Pinned", lambda memory, device: registered.put(memory.ctypes.data))
    monkeypatch.setattr(host, "PIECE_BYTES", 7 * LIKE.element_size() * 2)
    others = threading.enumerate()
    slab = Slab(28, LIKE, torch.device("cpu"))
    pieces = [part.data_ptr() for part in slab.views([range(28)])]
    (pin,) = [each for each in threading.enumerate() if each not in others]
    assert registered.get(timeout=30) == pieces[0]
    for taken, piece in ((5, 1), (9, 2)):
        assert slab.take_rows(taken) and registered.get(timeout=30) == pieces[piece]
    assert slab.take_rows(7) and registered.get(timeout=30) == pieces[3] and slab.take_rows(7)
    del slab  # the thread has nothing left to do
    pin.join(30)
    assert not pin.is_alive() and registered.empty()


def test_memory_is_pinned_in_pieces_beside_start_up_and_no_copy_spans_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, done = threading.Event(), threading.Event()
    registered: list[tuple[int, int]] = []

    def pin(memory: npt.NDArray[np.uint8], device: torch.device) -> None:
        go.wait(30)
        registered.append((memory.ctypes.data, memory.nbytes))
        if len(registered) == 4:
            done.set()

    monkeypatch.setattr(host, "Pinned", pin)
    monkeypatch.setattr(host, "PIECE_BYTES", 7 * LIKE.element_size() * 2)
    slab = Slab(24, LIKE, torch.device("cpu"))  # returns though nothing is registered yet
    runs = slab.take_rows(24)
    assert runs and not registered
    parts = slab.views(runs)
    assert [len(part) for part in parts] == [7, 7, 7, 3]
    for number, part in enumerate(slab.views([range(5, 16)])):
        part.fill_(number)
    assert torch.cat(parts)[5:16, 0].tolist() == [0.0] * 2 + [1.0] * 7 + [2.0] * 2
    go.set()
    assert done.wait(30)
    assert registered == [(part.data_ptr(), part.nbytes) for part in parts]


def test_a_slab_of_nothing_has_nothing() -> None:
    assert Slab(0, LIKE, None).take_rows(1) is None
