"""Matrices of a few bits, made whole: the arithmetic of AWQ, GPTQ and compressed-tensors'
pack-quantized.

Knows the numbers, nothing of files (`weights.py`) nor of names (`families/packed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from saccade.families.packed import Packed, Role
from saccade.nn.weights import Part

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the k-th of eight neighbours lies among the 4-bit numbers of an int32, lowest first."""
BLOCK_VALUES = 1 << 20
"""Values that are made whole at a time: what is made of them on the way is float32."""


def unpack(words: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """uint8 numbers of int32 words [A, B], of which each holds 32 / bits neighbours along `axis`,
    the lowest bits first, or as `order` says.
    """
    each, mask = 32 // bits, (1 << bits) - 1
    rows, columns = words.shape
    shape = (rows, each, columns) if axis == 0 else (rows, columns, each)
    numbers = torch.empty(shape, dtype=torch.uint8)
    for place, at in enumerate(order or range(each)):
        numbers.select(1 + axis, place).copy_((words >> (at * bits)).bitwise_and_(mask))
    return numbers.flatten(axis, axis + 1)


def restore_packed(
    packed: Packed, pieces: Mapping[Role, torch.Tensor], part: Part, target: torch.Tensor
) -> None:
    """target = the wanted rows and columns of the matrix that `pieces` are, a few rows at a time.

    Groups that `pieces` name must exist.
    """
    outputs, inputs = part.shape
    rows, columns = (*part.index, *(slice(None),) * (2 - len(part.index)))
    values = _numbers(packed, pieces["values"], 0 if packed.layout == "gptq" else 1)
    turned = packed.layout != "compressed-tensors"
    scales = pieces["scales"].float()
    if turned:
        values, scales = values.t(), scales.t()
    if "zeros" in pieces:
        stored = _numbers(packed, pieces["zeros"], 1 if turned else 0)
        zeros = (stored.t() if turned else stored)[:outputs].float() + packed.zero_shift
    else:
        zeros = torch.full_like(scales, 1 << (packed.bits - 1))
    values = values[:outputs, :inputs][rows, columns].contiguous()
    group = pieces["order"].long() if "order" in pieces else _in_turn(packed, inputs)
    scales, zeros, group = scales[rows], zeros[rows], group[columns]
    count = max(1, BLOCK_VALUES // max(1, values.shape[1]))
    for first in range(0, values.shape[0], count):
        some = slice(first, first + count)
        wide = values[some].float().sub_(zeros[some].index_select(1, group))
        target[some].copy_(wide.mul_(scales[some].index_select(1, group)))


def _in_turn(packed: Packed, inputs: int) -> torch.Tensor:
    """Each input's group, where neighbours share one."""
    if not packed.group:
        return torch.zeros(inputs, dtype=torch.int64)
    return torch.arange(inputs) // packed.group


def _numbers(packed: Packed, words: torch.Tensor, axis: int) -> torch.Tensor:
    return unpack(words, packed.bits, axis, AWQ_ORDER if packed.layout == "awq" else ())
