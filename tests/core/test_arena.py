"""The arena: bounded, without a name, shared by descriptor, and never two owners for one byte."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.core.arena import ALIGNMENT, Arena
from saccade.core.plan import PixelSlot

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(16 * ALIGNMENT)
    yield arena
    arena.close()


def test_a_slot_is_a_view_not_a_copy(arena: Arena) -> None:
    offset = arena.allocate(5 * 7 * 3)
    assert offset is not None
    slot = PixelSlot(offset, 5, 7)
    arena.view(slot)[...] = 9
    assert arena.view(slot).shape == (5, 7, 3)
    assert (arena.view(slot) == 9).all()


def test_a_full_arena_says_none_and_takes_again_what_is_freed(arena: Arena) -> None:
    offsets = [arena.allocate(ALIGNMENT) for _ in range(16)]
    assert sorted(offset for offset in offsets if offset is not None) == [
        n * ALIGNMENT for n in range(16)
    ]
    assert arena.allocate(1) is None
    arena.free(3 * ALIGNMENT)
    arena.free(5 * ALIGNMENT)
    assert arena.allocate(2 * ALIGNMENT) is None, "no hole is that large"
    arena.free(4 * ALIGNMENT)
    assert arena.allocate(3 * ALIGNMENT) == 3 * ALIGNMENT, "neighbouring holes are one"
    assert arena.in_use == arena.size


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * ALIGNMENT)), max_size=60))
def test_slots_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    arena = Arena.create(16 * ALIGNMENT)
    held: dict[int, int] = {}
    for release, number in steps:
        if release and held:
            offset = list(held)[number % len(held)]
            arena.free(offset)
            del held[offset]
        elif (found := arena.allocate(number)) is not None:
            offset = found
            assert offset % ALIGNMENT == 0
            assert offset + number <= arena.size
            assert all(
                offset + number <= at or at + length <= offset for at, length in held.items()
            )
            held[offset] = number
        assert arena.in_use == sum(-(-length // ALIGNMENT) * ALIGNMENT for length in held.values())
    for offset in held:
        arena.free(offset)
    assert arena.allocate(arena.size) == 0
    arena.close()


def test_another_process_writes_where_this_one_reads(arena: Arena) -> None:
    code = (
        "import sys; from saccade.core.arena import Arena; from saccade.core.plan import "
        "PixelSlot\n"
        "Arena.attach(int(sys.argv[1]), int(sys.argv[2])).view(PixelSlot(4096, 2, 3))[1] = 7"
    )
    before = set(Path("/dev/shm").iterdir())
    subprocess.run(
        [sys.executable, "-c", code, str(arena.fd), str(arena.size)],
        pass_fds=(arena.fd,),
        check=True,
        cwd=ROOT,
    )
    np.testing.assert_array_equal(arena.view(PixelSlot(4096, 2, 3))[:, 0, 0], [0, 7])
    assert set(Path("/dev/shm").iterdir()) == before
    assert "memfd" in str(Path(f"/proc/self/fd/{arena.fd}").readlink()), "memory without a name"
