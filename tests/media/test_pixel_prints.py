"""Prints of images: what differs, by squares, and nothing of images that nobody asks about."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
import pytest

from saccade.core.types import ImageKey
from saccade.media import pixel_prints
from saccade.media.pixel_prints import PixelPrint, PixelPrints

GREY = np.full((64, 80, 3), 128, np.uint8)


def print_of(pixels: npt.NDArray[np.uint8]) -> PixelPrint:
    return PixelPrint.of(memoryview(pixels.tobytes()), pixels.shape[:2])


def test_a_pixel_changes_its_square_alone() -> None:
    for y, x in ((0, 0), (15, 15), (16, 31), (63, 79)):
        other = GREY.copy()
        other[y, x, 2] += 1
        assert print_of(other).changed(print_of(GREY)) == 1 / 20
    other = GREY.copy()
    other[:16] = 0
    assert print_of(other).changed(print_of(GREY)) == 5 / 20
    assert print_of(GREY).changed(print_of(GREY.copy())) == 0


def test_squares_at_the_edge_count_too() -> None:
    grey = np.zeros((17, 33, 3), np.uint8)
    other = grey.copy()
    other[16, 32] = 1
    assert print_of(other).changed(print_of(grey)) == 1 / 6


def test_two_sizes_are_not_compared() -> None:
    assert print_of(GREY).changed(print_of(GREY[:32])) is None
    assert print_of(GREY.reshape(80, 64, 3)).changed(print_of(GREY)) is None


def key(name: bytes, salt: str = "") -> ImageKey:
    return ImageKey(name * 32, b"s" * 16, salt)


def take(prints: PixelPrints, of: ImageKey, pixels: npt.NDArray[np.uint8] = GREY) -> None:
    asyncio.run(prints.take(of, memoryview(pixels.tobytes()), (64, 80)))


def test_only_watched_images_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel_prints, "MAX_PRINTS", 2)
    prints = PixelPrints()
    prints.watch([key(b"a"), key(b"b"), key(b"d")])
    for each in (key(b"a"), key(b"b"), key(b"c")):
        take(prints, each)
    assert prints.changed(key(b"b"), key(b"a")) == 0
    assert prints.changed(key(b"c"), key(b"a")) is None
    assert prints.changed(key(b"a", "other"), key(b"b")) is None, "no print under this salt"
    assert prints.changed(key(b"c"), key(b"c")) == 0, "the same bytes"
    take(prints, key(b"d"))
    assert prints.changed(key(b"b"), key(b"a")) is None, "the least recently used has gone"
