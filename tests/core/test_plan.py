"""Plans and masks on their way to the worker: masks that are alike cross once,
and what rows ask for is told apart.
"""

from __future__ import annotations

import numpy as np
import pytest

from saccade.core.plan import MAX_COMPARED, Masks, Plan, ReadRun, Row, RowExtra, ScoreRun
from saccade.ipc.child import Codec


@pytest.mark.parametrize("kinds", [1, 3, MAX_COMPARED, MAX_COMPARED + 1, 200])
def test_every_row_keeps_its_mask_and_rows_that_are_alike_share_a_line(kinds: int) -> None:
    draw = np.random.default_rng(kinds)
    drawn = draw.integers(-(2**31), 2**31, (kinds, 40), dtype=np.int32)
    rows = drawn[draw.permutation(np.arange(200) % kinds)]
    masks = Masks.of(7, [row.tobytes() for row in rows])
    unpacked = masks.rows()
    assert (unpacked == rows).all() and unpacked.flags.writeable
    count = len(masks.words) // (40 * 4)
    assert count == kinds if kinds <= MAX_COMPARED else kinds <= count <= 200


def test_what_a_row_asks_for_is_told_apart_and_takes_no_place_where_nothing_is() -> None:
    codec: Codec[Plan, Plan] = Codec(Plan, Plan)
    asked: tuple[RowExtra, ...] = (ScoreRun(1, 9, 2), ReadRun(3, ()), ReadRun(1, (7, 8)))
    plan = Plan(1, rows=(Row(0, 5, 1, (), True), Row(1, 0, 9, (), False, extras=asked)))
    header, body = 5, codec.encode(plan)
    assert codec.decode(0, body[header:]) == plan
    without = codec.encode(Plan(1, rows=(Row(0, 5, 1, (), True),)))
    assert b"score" not in without and b"read" not in without
