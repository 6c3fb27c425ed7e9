"""The instructions of PyTorch's small operations, compiled by Numba when a machine first asks for
them (`twins.py`): each has PyTorch's bits. A function here returns a kernel's body for some sizes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from saccade.kernels.x86.jit import (
    claim,
    halves,
    larger,
    longs,
    narrow,
    reals,
    smaller,
    wide,
    words,
)
from saccade.kernels.x86.kernel_object import Body


def gather(lane: int) -> Body:
    """Return the body that copies values of 2 `lane`s by index.

    result[row, column] is source[index[row], column], or source[row, index[column]] if `across`.
    """

    def gather(block):
        source, index, out = halves(block[2]), longs(block[3]), halves(block[4])
        rows, columns, across, count = block[5], block[6], block[7], block[8]
        down, right = block[9] * lane, block[10] * lane
        while claim(block) < block[1]:
            for row in range(rows):
                at = row * down
                if not across:
                    at = smaller(larger(index[row], 0), count - 1) * down
                for column in range(columns):
                    place = column
                    if across:
                        place = smaller(larger(index[column], 0), count - 1)
                    for part in range(lane):
                        out[(row * columns + column) * lane + part] = source[
                            at + place * right + part
                        ]

    return gather


def place_beside() -> Body:
    """Return the body that copies rows of 16-bit lanes into a part of wider rows."""

    def place_beside(block):
        source, out = halves(block[2]), halves(block[3])
        rows, width, wider = block[4], block[5], block[6]
        while claim(block) < block[1]:
            for row in range(rows):
                for at in range(width):
                    out[row * wider + at] = source[row * width + at]

    return place_beside


def times_reals() -> Body:
    """Return the body that multiplies whole numbers [T, N] by float32 [N]."""

    def times_reals(block):
        numbers, factors, out = longs(block[2]), reals(block[3]), reals(block[4])
        rows, columns = block[5], block[6]
        while claim(block) < block[1]:
            for row in range(rows):
                for column in range(columns):
                    at = row * columns + column
                    out[at] = np.float32(numbers[at]) * factors[column]

    return times_reals


def negative() -> Body:
    """Return the body that turns the signs of float32, that of 0 too."""

    def negative(block):
        source, out = words(block[2]), words(block[3])
        while claim(block) < block[1]:
            for at in range(block[4]):
                out[at] = source[at] ^ np.int32(-2147483648)

    return negative


def add_halves() -> Body:
    """Return the body that adds bfloat16 numbers."""

    def add_halves(block):
        first, second, out = halves(block[2]), halves(block[3]), halves(block[4])
        while claim(block) < block[1]:
            for at in range(block[5]):
                out[at] = narrow(wide(first[at]) + wide(second[at]))

    return add_halves


def widen() -> Body:
    """Return the body that converts bfloat16 to float32."""

    def widen(block):
        source, out = halves(block[2]), reals(block[3])
        while claim(block) < block[1]:
            for at in range(block[4]):
                out[at] = wide(source[at])

    return widen


def round_halves() -> Body:
    """Return the body that converts float32 to bfloat16."""

    def round_halves(block):
        source, out = reals(block[2]), halves(block[3])
        while claim(block) < block[1]:
            for at in range(block[4]):
                out[at] = narrow(source[at])

    return round_halves
