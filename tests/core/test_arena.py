"""The arena: bounded, without a name, shared by descriptor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from saccade.core.arena import Arena
from saccade.core.plan import PixelSlot

ALIGNMENT = 4096
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(16 * ALIGNMENT)
    yield arena
    arena.close()


def test_a_slot_is_a_view_not_a_copy(arena: Arena) -> None:
    slot = PixelSlot(2 * ALIGNMENT, 5, 7)
    arena.view(slot)[...] = 9
    assert arena.view(slot).shape == (5, 7, 3)
    assert (arena.view(slot) == 9).all()


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
