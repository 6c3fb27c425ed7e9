"""Masks on their way to the worker: rows that are alike cross once."""

from __future__ import annotations

import numpy as np
import pytest

from saccade.core.plan import MOST_COMPARED, Masks


@pytest.mark.parametrize("kinds", [1, 3, MOST_COMPARED, MOST_COMPARED + 1, 200])
def test_every_row_keeps_its_mask_and_rows_that_are_alike_share_a_line(kinds: int) -> None:
    draw = np.random.default_rng(kinds)
    drawn = draw.integers(-(2**31), 2**31, (kinds, 40), dtype=np.int32)
    rows = drawn[draw.permutation(np.arange(200) % kinds)]
    masks = Masks.of(7, [row.tobytes() for row in rows])
    unpacked = masks.rows()
    assert (unpacked == rows).all() and unpacked.flags.writeable
    count = len(masks.words) // (40 * 4)
    assert count == kinds if kinds <= MOST_COMPARED else kinds <= count <= 200
