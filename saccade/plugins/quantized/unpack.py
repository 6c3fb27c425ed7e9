"""Unpacks quantized matrices in the layouts of AWQ, GPTQ and compressed-tensors (pack-quantized),
to dequantize them or to repack them for the kernels.

`packed.py` reads the files, and `packed_layouts.py` defines the names of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from saccade.kernels.matrix import Int4Matrix
from saccade.kernels.reference.int4 import MIN_GROUP, holds, pack_int4
from saccade.nn.weights import Part
from saccade.plugins.quantized.packed_layouts import Packed, Role

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's order: the k-th of eight consecutive values starts at bit `4 * AWQ_ORDER[k]` of an
int32.
"""
BLOCK_VALUES = 1 << 20
"""Number of values that are dequantized at a time. Intermediate values are float32."""


class Numbers(NamedTuple):
    """A rank's slice of a packed matrix, which is (values[o, i] - zeros[o, g]) * scales[o, g],
    where g = owners[i].
    """

    values: torch.Tensor  # uint8 [out, in]
    scales: torch.Tensor  # [out, groups], with all groups of the full matrix
    zeros: torch.Tensor | None  # [out, groups]; `None` if all are 2 ** (bits - 1)
    owners: torch.Tensor  # int64 [in]: the group of each input
    group: int  # inputs per scale
    bits: int
    stored: int  # size of the slice in the checkpoint, in bytes


def unpack(words: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Unpack int32 words [A, B] into uint8 numbers.

    Each word has 32 / bits consecutive values along `axis`, starting at the lowest bits or in the
    given `order`.
    """
    each, mask = 32 // bits, (1 << bits) - 1
    rows, columns = words.shape
    shape = (rows, each, columns) if axis == 0 else (rows, columns, each)
    numbers = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for place, at in enumerate(order or range(each)):
        numbers.select(1 + axis, place).copy_((words >> (at * bits)).bitwise_and_(mask))
    return numbers.flatten(axis, axis + 1)


def unpack_matrix(
    packed: Packed, pieces: Mapping[Role, torch.Tensor], part: Part, device: torch.device
) -> Numbers:
    """Unpack the rows and columns that `part` selects from a matrix to the device.

    pieces: the stored tensors by role. All groups that occur in `pieces["order"]` must exist.
    """
    outputs, inputs = part.shape
    rows, columns = (*part.index, *(slice(None),) * (2 - len(part.index)))
    stored = sum(piece.nbytes for piece in pieces.values())
    there = {role: piece.to(device) for role, piece in pieces.items()}
    values = _numbers(packed, there["values"], 0 if packed.layout == "gptq" else 1)
    turned = packed.layout != "compressed-tensors"
    scales, zeros = there["scales"], None
    if turned:
        values, scales = values.t(), scales.t()
    if "zeros" in there:
        points = _numbers(packed, there["zeros"], 1 if turned else 0)
        zeros = (points.t() if turned else points)[:outputs] + packed.zero_shift
    values = values[:outputs, :inputs][rows, columns].contiguous()
    owners = there["order"].long() if "order" in there else _in_turn(packed, inputs).to(device)
    return Numbers(
        values,
        scales[rows],
        None if zeros is None else zeros[rows],
        owners[columns],
        packed.group or values.shape[1],
        packed.bits,
        round(stored * values.numel() / max(1, outputs * inputs)),
    )


def restore_packed(numbers: Numbers, target: torch.Tensor) -> None:
    """Dequantize `numbers` into `target`, a few rows at a time."""
    values, scales, zeros, owners, _, bits, _ = numbers
    count = max(1, BLOCK_VALUES // max(1, values.shape[1]))
    middle = torch.full_like(scales, 1 << (bits - 1), dtype=torch.float32)
    wide_scales, wide_zeros = scales.float(), middle if zeros is None else zeros.float()
    for first in range(0, values.shape[0], count):
        some = slice(first, first + count)
        wide = values[some].float().sub_(wide_zeros[some].index_select(1, owners))
        target[some].copy_(wide.mul_(wide_scales[some].index_select(1, owners)))


def join_int4(parts: Sequence[Numbers]) -> tuple[Int4Matrix | None, str]:
    """Concatenate one rank's slices of several matrices along their outputs to one 4-bit matrix.

    Returns the matrix and "", or `None` and the reason why that is not possible.
    """
    first = parts[0]
    group, inputs = first.group, first.values.shape[1]
    if any(part.bits != 4 for part in parts):
        return None, "only 4-bit numbers are multiplied as they are"
    if len({part.group for part in parts}) > 1 or not holds(group, inputs):
        return None, f"scales of {group} inputs, not of a multiple of {MIN_GROUP}"
    orders, starts = zip(*(_order(part) for part in parts))
    if any(start is None for start in starts):
        return None, f"a rank's slice cuts groups of {group} inputs"
    if not all(order.equal(orders[0]) for order in orders):
        return None, "matrices of one product have their inputs in different orders"
    ordered = orders[0].equal(torch.arange(inputs).to(orders[0]))
    groups = -(-inputs // group)

    def joined(each: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[:, start : start + groups] for part, start in zip(each, starts)])

    numbers = torch.cat([part.values for part in parts])
    if not ordered:
        numbers = numbers.index_select(1, orders[0])
    middle = [
        part.zeros if part.zeros is not None else torch.full_like(part.scales, 8, dtype=torch.uint8)
        for part in parts
    ]
    zeros = None if all(part.zeros is None for part in parts) else joined(middle)
    scales = joined([part.scales for part in parts])
    return pack_int4(numbers, scales, zeros, group, None if ordered else orders[0]), ""


def _order(part: Numbers) -> tuple[torch.Tensor, int | None]:
    """Return the order that sorts inputs by their groups, and the index of the first group.

    The index is `None` if a group other than the last one is incomplete.
    """
    order = part.owners.argsort(stable=True)
    owners = part.owners.index_select(0, order)
    first = int(owners[0]) if len(owners) else 0
    wanted = first + torch.arange(len(owners), device=owners.device) // part.group
    return order, first if owners.equal(wanted) else None


def _in_turn(packed: Packed, inputs: int) -> torch.Tensor:
    """Return the group of each input for groups of consecutive inputs."""
    if not packed.group:
        return torch.zeros(inputs, dtype=torch.int64)
    return torch.arange(inputs) // packed.group


def _numbers(packed: Packed, words: torch.Tensor, axis: int) -> torch.Tensor:
    return unpack(words, packed.bits, axis, AWQ_ORDER if packed.layout == "awq" else ())
