"""Numba code of small PyTorch operations, compiled at first use (`compiled_ops.py`). Results are
bit-identical to PyTorch's. Each function returns the body of a kernel for the given sizes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from saccade.plugins.cpu.jit import (
    bf16_to_f32,
    f32_to_bf16,
    float32_ptr,
    int32_ptr,
    int64_ptr,
    maximum,
    minimum,
    next_item,
    uint16_ptr,
)
from saccade.plugins.cpu.kernel_object import Body


def gather(lane: int) -> Body:
    """Return the body that gathers rows or columns of a matrix by index.

    result[row, column] is source[index[row], column], or source[row, index[column]] if `across`.
    lane: the size of a value in units of 16 bits.
    """

    def gather(block):
        source, index, out = uint16_ptr(block[2]), int64_ptr(block[3]), uint16_ptr(block[4])
        rows, columns, across, count = block[5], block[6], block[7], block[8]
        down, right = block[9] * lane, block[10] * lane
        while next_item(block) < block[1]:
            for row in range(rows):
                at = row * down
                if not across:
                    at = minimum(maximum(index[row], 0), count - 1) * down
                for column in range(columns):
                    place = column
                    if across:
                        place = minimum(maximum(index[column], 0), count - 1)
                    for part in range(lane):
                        out[(row * columns + column) * lane + part] = source[
                            at + place * right + part
                        ]

    return gather


def concat_columns() -> Body:
    """Return the body that copies a matrix into some columns of a wider one. Sizes are in 16-bit
    units.
    """

    def concat_columns(block):
        source, out = uint16_ptr(block[2]), uint16_ptr(block[3])
        rows, width, wider = block[4], block[5], block[6]
        while next_item(block) < block[1]:
            for row in range(rows):
                for at in range(width):
                    out[row * wider + at] = source[row * width + at]

    return concat_columns


def mul_f32() -> Body:
    """Return the body that multiplies int64 [T, N] by float32 [N]."""

    def mul_f32(block):
        numbers, factors, out = int64_ptr(block[2]), float32_ptr(block[3]), float32_ptr(block[4])
        rows, columns = block[5], block[6]
        while next_item(block) < block[1]:
            for row in range(rows):
                for column in range(columns):
                    at = row * columns + column
                    out[at] = np.float32(numbers[at]) * factors[column]

    return mul_f32


def negative() -> Body:
    """Return the body that negates float32 values, including the sign of zero."""

    def negative(block):
        source, out = int32_ptr(block[2]), int32_ptr(block[3])
        while next_item(block) < block[1]:
            for at in range(block[4]):
                out[at] = source[at] ^ np.int32(-2147483648)

    return negative


def add_bf16() -> Body:
    """Return the body that adds bfloat16 values."""

    def add_bf16(block):
        first, second, out = uint16_ptr(block[2]), uint16_ptr(block[3]), uint16_ptr(block[4])
        while next_item(block) < block[1]:
            for at in range(block[5]):
                out[at] = f32_to_bf16(bf16_to_f32(first[at]) + bf16_to_f32(second[at]))

    return add_bf16


def widen() -> Body:
    """Return the body that converts bfloat16 to float32."""

    def widen(block):
        source, out = uint16_ptr(block[2]), float32_ptr(block[3])
        while next_item(block) < block[1]:
            for at in range(block[4]):
                out[at] = bf16_to_f32(source[at])

    return widen


def round_to_bf16() -> Body:
    """Return the body that converts float32 to bfloat16."""

    def round_to_bf16(block):
        source, out = float32_ptr(block[2]), uint16_ptr(block[3])
        while next_item(block) < block[1]:
            for at in range(block[4]):
                out[at] = f32_to_bf16(source[at])

    return round_to_bf16
