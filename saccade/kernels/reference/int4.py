"""Matrices of 4 bits (AWQ, GPTQ, compressed-tensors' pack-quantized): the one layout that they have
in memory, and products with them in plain PyTorch. On a GPU those are `triton/int4.py`'s, where
weights cross memory in 4 bits.

Owns the layout and what it means. Knows nothing of checkpoints' layouts (`runtime/packed.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

CHUNK = 128
"""Inputs of an output that lie in neighbouring words; matrices are padded to whole chunks."""
LEAST_GROUP = 32
"""Inputs that share a scale divide by this: so many are multiplied at a time."""
MIDDLE = 8
"""The number that means 0 where a matrix has no zero points."""
LARGEST = 15
"""Largest number."""
LEAST_SCALE = 1e-30
"""In place of 0, for groups of zeros."""
BLOCK_VALUES = 1 << 17
"""Values that are quantised at a time: what is made of them on the way stays in a core's cache."""
EACH = 8
"""Numbers of a word."""


class Int4Matrix(NamedTuple):
    """matrix[o, order[i]] = (number[o, i] - zeros[i // group, o]) * scales[i // group, o].

    words: int32 [out, chunks * 16], a chunk being 128 inputs. Bits 4 p to 4 p + 3 of a chunk's word
    j (p from 0 to 3) are the number of the chunk's input 32 p + 2 j, and the bits 16 above them
    that of the next: so a shift and a mask make two neighbours of 16 bits each.
    scales: [groups, out] in the checkpoint's own float format. zeros: uint8 [groups, out], 0 to
    16; None: all are `MIDDLE`. Inputs that pad may have any: they are multiplied by 0.
    group: inputs that share a scale, divides by `LEAST_GROUP`; all, in whole chunks, where there is
    one group. inputs: those that do not pad.
    order: int64 [inputs], which input of the matrix is the layout's i-th; None: they lie in order.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    inputs: int
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        there = (self.words, self.scales, self.zeros, self.order)
        return sum(each.nbytes for each in there if each is not None)


def holds(group: int, inputs: int) -> bool:
    """Whether the layout has matrices of so many inputs that share a scale."""
    return group >= inputs or group % LEAST_GROUP == 0


def pack_int4(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    order: torch.Tensor | None = None,
) -> Int4Matrix:
    """numbers: uint8 [out, in], 0 to 15, in the order in which `group` neighbours share a scale.
    scales: [out, groups]; zeros: uint8 of that shape, or None. order: as in Int4Matrix.

    Everything is made on the device of `numbers`.
    """
    outputs, inputs = numbers.shape
    chunks = -(-inputs // CHUNK)
    group = chunks * CHUNK if group >= inputs else group
    assert holds(group, inputs) and scales.shape == (outputs, -(-inputs // group))
    padded = F.pad(numbers, (0, chunks * CHUNK - inputs)).view(outputs, chunks, 2, 2, 16, 2)
    halves = padded[:, :, :, 0] | padded[:, :, :, 1] << 4  # [out, chunks, p // 2, j, neighbour]
    words = halves.permute(0, 1, 3, 4, 2).reshape(outputs, chunks * CHUNK // 2)
    more = -(-chunks * CHUNK // group) - scales.shape[1]
    return Int4Matrix(
        words.view(torch.int32),
        F.pad(scales, (0, more)).t().contiguous(),
        None if zeros is None else F.pad(zeros, (0, more)).t().contiguous(),
        group,
        inputs,
        order,
    )


def numbers_of(matrix: Int4Matrix) -> torch.Tensor:
    """The numbers as `pack_int4` got them: uint8 [out, in]."""
    outputs, words = matrix.words.shape
    halves = matrix.words.view(torch.uint8).view(outputs, words // 16, 16, 2, 2)
    halves = halves.permute(0, 1, 4, 2, 3)  # [out, chunks, p // 2, j, neighbour]
    padded = torch.stack((halves & 15, halves >> 4), 3)
    return padded.reshape(outputs, words * EACH)[:, : matrix.inputs]


def dense(matrix: Int4Matrix) -> torch.Tensor:
    """The matrix [out, in] in float32, its inputs in their own order."""
    _, scales, zeros, group, inputs, order = matrix

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.t().float().repeat_interleave(group, 1)[:, :inputs]

    wide = numbers_of(matrix).float() - (MIDDLE if zeros is None else spread(zeros))
    wide *= spread(scales)
    if order is None:
        return wide
    whole = torch.empty_like(wide)
    whole[:, order] = wide
    return whole


def quantise_int4(weight: torch.Tensor, group: int) -> Int4Matrix:
    """`weight` [out, in], each `group` neighbours by the least and the largest of them."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    numbers = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, groups, device=weight.device)
    zeros = torch.empty(outputs, groups, dtype=torch.uint8, device=weight.device)
    step = max(1, BLOCK_VALUES // max(1, inputs))
    for first in range(0, outputs, step):
        some = slice(first, first + step)
        wide = F.pad(weight[some].float(), (0, groups * group - inputs))
        wide = wide.view(-1, groups, group)
        least, most = wide.amin(2).clamp_max_(0), wide.amax(2).clamp_min_(0)
        scale = (most - least).div_(LARGEST).clamp_min_(LEAST_SCALE)
        zero = (-least / scale).round_()
        made = (wide / scale.unsqueeze(2)).round_().add_(zero.unsqueeze(2)).clamp_(0, LARGEST)
        numbers[some] = made.view(-1, groups * group)[:, :inputs]
        scales[some], zeros[some] = scale, zero
    return pack_int4(numbers, scales, zeros, group)


def pad_int4_outputs(matrix: Int4Matrix, sizes: Sequence[int], more: int) -> Int4Matrix:
    """The matrix, which is parts of so many outputs, with `more` outputs of 0 behind each."""
    words, scales, zeros, *_ = matrix

    def widen(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.pad(part, (0, more)) for part in values.split([*sizes], 1)], 1)

    return matrix._replace(
        words=torch.cat([F.pad(part, (0, 0, 0, more)) for part in words.split([*sizes])]),
        scales=widen(scales),
        zeros=None if zeros is None else widen(zeros),
    )


def pad_int4_inputs(matrix: Int4Matrix, more: int) -> Int4Matrix:
    """The matrix with `more` inputs, for rows that have 0 there."""
    words, scales, zeros, group, inputs, order = matrix
    now = inputs + more
    chunks = -(-now // CHUNK)
    group = chunks * CHUNK if len(scales) == 1 else group
    groups = -(-chunks * CHUNK // group) - len(scales)
    return Int4Matrix(
        F.pad(words, (0, chunks * CHUNK // EACH - words.shape[1])),
        F.pad(scales, (0, 0, 0, groups)),
        None if zeros is None else F.pad(zeros, (0, 0, 0, groups)),
        group,
        now,
        None if order is None else torch.cat((order, torch.arange(inputs, now).to(order))),
    )


def int4_linear(
    x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, in] @ matrix.T + bias, [T, out] in the dtype of `x`."""
    return F.linear(x, dense(matrix).to(x.dtype), bias)
