"""4-bit matrices (AWQ, GPTQ, compressed-tensors' pack-quantized): packing, and matmuls in plain
PyTorch. The kernels of backends read the packed format.

`plugins/quantized/packed.py` reads the formats of checkpoints.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import CHUNK, EACH, Int4Matrix, Matrix
from saccade.kernels.reference.linear import linear

MIN_GROUP = 32
"""Inputs per scale must be a multiple of this, which kernels multiply at a time."""
ZERO_POINT = 8
"""The number that represents 0 in a matrix without zero points."""
LARGEST = 15
"""The largest 4-bit number."""
MIN_SCALE = 1e-30
"""The scale of groups that are all zeros, to avoid a division by 0."""
MAX_ZERO = 1 << 15
"""The largest zero point, as packed panels store them in float16."""
BLOCK_VALUES = 1 << 17
"""Values quantized at a time, so that intermediate results stay in a core's cache."""


def holds(group: int, inputs: int) -> bool:
    """Return True if the format supports this group size for a matrix with this many inputs."""
    return group >= inputs or group % MIN_GROUP == 0


def pack_int4(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    order: torch.Tensor | None = None,
) -> Int4Matrix:
    """Pack 4-bit numbers into a matrix, on the device of `numbers`.

    numbers: uint8 [out, in], 0 to 15, in an order in which each `group` adjacent inputs share a
        scale.
    scales: [out, groups].
    zeros: [out, groups], or None.
    order: as in `Int4Matrix`.
    """
    outputs, inputs = numbers.shape
    chunks = -(-inputs // CHUNK)
    group = chunks * CHUNK if group >= inputs else group
    assert holds(group, inputs) and scales.shape == (outputs, -(-inputs // group))
    padded = F.pad(numbers, (0, chunks * CHUNK - inputs)).view(outputs, chunks, 2, 2, 16, 2)
    halves = padded[:, :, :, 0] | padded[:, :, :, 1] << 4  # [out, chunks, p // 2, j, neighbor]
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
    """Return the numbers from which `pack_int4` made the matrix, uint8 [out, in]."""
    outputs, words = matrix.words.shape
    halves = matrix.words.view(torch.uint8).view(outputs, words // 16, 16, 2, 2)
    halves = halves.permute(0, 1, 4, 2, 3)  # [out, chunks, p // 2, j, neighbor]
    padded = torch.stack((halves & 15, halves >> 4), 3)
    return padded.reshape(outputs, words * EACH)[:, : matrix.inputs]


def dense(matrix: Int4Matrix) -> torch.Tensor:
    """Return the dequantized matrix [out, in] in float32, with inputs in their original order."""
    scales, zeros, order = matrix.scales, matrix.zeros, matrix.order

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.t().float().repeat_interleave(matrix.group, 1)[:, : matrix.inputs]

    wide = numbers_of(matrix).float() - (ZERO_POINT if zeros is None else spread(zeros))
    wide *= spread(scales)
    if order is None:
        return wide
    whole = torch.empty_like(wide)
    whole[:, order] = wide
    return whole


def quantise_int4(weight: torch.Tensor, group: int) -> Int4Matrix:
    """Quantize `weight` [out, in] in groups of `group` inputs, each from its minimum to its
    maximum.

    This is for CPUs. Zero points are float32, so that minimum and maximum are represented exactly,
    and blocks of GGUF's Q4_1 are not changed.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    numbers = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, groups, device=weight.device)
    zeros = torch.empty(outputs, groups, device=weight.device)
    step = max(1, BLOCK_VALUES // max(1, inputs))
    for first in range(0, outputs, step):
        some = slice(first, first + step)
        wide = F.pad(weight[some].float(), (0, groups * group - inputs))
        wide = wide.view(-1, groups, group)
        least = wide.amin(2)
        scale, zeros[some] = steps_from(least, (wide.amax(2) - least).div_(LARGEST))
        made = (wide - least.unsqueeze(2)).div_(scale.unsqueeze(2)).round_().clamp_(0, LARGEST)
        numbers[some] = made.view(-1, groups * group)[:, :inputs]
        scales[some] = scale
    return pack_int4(numbers, scales, zeros, group)


def steps_from(least: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 (scales, zeros) for groups whose numbers represent `least + number * step`.

    A group with nearly equal values becomes a constant. Its numbers must then be 0.
    """
    flat = step.abs() * MAX_ZERO <= least.abs()
    scales = torch.where(flat, -least, step)
    scales = torch.where(scales == 0, MIN_SCALE, scales)
    return scales, torch.where(flat, (least != 0).float(), -least / scales)


def prepack_int4(matrix: Int4Matrix) -> Matrix:
    """Return the matrix unchanged, because PyTorch needs no packing."""
    return matrix


def int4_linear(
    x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x @ matrix.T + bias` [T, out] in x's dtype, for x [T, in]."""
    return linear(x, dense(matrix).to(x.dtype), bias)
