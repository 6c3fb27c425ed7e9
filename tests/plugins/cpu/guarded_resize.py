"""Resizes images of many sizes whose pixels, weights and results are next to guard pages.

The vectors have so many bytes: `python -m tests.plugins.cpu.guarded_resize 32 1000`. Each size is
printed before it is resized, so that the last one is that of a fault.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from saccade.plugins.cpu import antialias, resize
from saccade.plugins.cpu.resize import AxisWeights
from saccade.plugins.cpu.resize_call import HEIGHT, TAPS, WIDTH
from tests.helpers.guarded import SIDES, Side, guarded_copy, guarded_empty

MODES = (*antialias.FILTERS,)
MAX_SIDE = 130
"""Pixels: to both sides of all that vectors of 64 bytes do apart."""
plain_weights = antialias.find_weights


class Guard:
    """Whatever the caller of the machine code makes itself is guarded, too."""

    side: Side = "end"

    def empty(self, shape: Any, dtype: Any = float) -> Any:
        return guarded_empty(shape, dtype, self.side)

    def weights(self, size: int, wanted: int, mode: str, taps: int) -> AxisWeights:
        found = plain_weights(size, wanted, mode, taps)
        first, values = (guarded_copy(each, self.side) for each in (found.first, found.values))
        return AxisWeights(first, values, found.shift)


def sums(pixels: np.ndarray, weights: AxisWeights) -> np.ndarray:
    """Return `pixels` [rows, columns, 3] with other columns, by plain sums."""
    taps = weights.values.shape[1]
    behind = max(0, int(weights.first.max()) + taps - pixels.shape[1])
    padded = np.pad(pixels.astype(np.int64), ((0, 0), (0, behind), (0, 0)))
    seen = padded[:, weights.first[:, None] + np.arange(taps)]  # [rows, wanted, taps, 3]
    total = (seen * weights.values[:, :, None]).sum(axis=2) + (1 << weights.shift >> 1)
    return np.clip(total >> weights.shift, 0, 255).astype(np.uint8)


def expected(pixels: np.ndarray, size: tuple[int, int], mode: str) -> np.ndarray:
    (rows, columns, _), (height, width) = pixels.shape, size
    if columns != width:
        pixels = sums(pixels, plain_weights(columns, width, mode, TAPS[WIDTH]))
    if rows != height:
        turned = pixels.transpose(1, 0, 2)
        weights = plain_weights(rows, height, mode, TAPS[HEIGHT])
        pixels = sums(turned, weights).transpose(1, 0, 2)
    return pixels


def main(wide: int, count: int) -> None:
    guard = Guard()
    numpy = SimpleNamespace(**{**vars(np), "empty": guard.empty, "zeros": guard.empty})
    for module in (resize, antialias):
        vars(module)["np"] = numpy
    vars(resize)["vector_bytes"] = lambda: wide
    vars(antialias)["find_weights"] = guard.weights
    draw = np.random.default_rng(wide)
    for number in range(count):
        sides = draw.integers(1, 2 if number % 16 == 0 else MAX_SIDE, 4)
        rows, columns, height, width = (int(side) for side in sides)
        width += (rows, columns) == (height, width)  # callers copy pixels of the same size
        mode, guard.side = MODES[number % len(MODES)], SIDES[number // len(MODES) % len(SIDES)]
        print(rows, columns, "to", height, width, mode, guard.side, flush=True)
        pixels = draw.integers(0, 256, (rows, columns, 3), np.uint8)
        target = guarded_empty((height, width, 3), np.uint8, guard.side)
        assert antialias.resize(target, guarded_copy(pixels, guard.side), mode)
        np.testing.assert_array_equal(target, expected(pixels, (height, width), mode))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
