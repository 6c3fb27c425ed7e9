"""Packing: pictures keep their order, and a pack stays within its limit."""

from __future__ import annotations

from saccade.runtime.vision.packed_encoder import packs


def test_packs_keep_order_and_limit() -> None:
    assert packs([300, 700, 40, 2000, 1, 1], 1024) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 6),
    ]
    assert packs([300, 700, 40], None) == [slice(0, 3)]
    assert packs([], 1024) == []
