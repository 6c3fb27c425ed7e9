"""The memory of bfloat16 matrices that oneDNN has packed, which functions of ours read: facts that
are compared with the real memory before use.
"""

from __future__ import annotations

import ctypes

import torch

from saccade.kernels.reference.linear import dense_linear, pack

WIDTHS = (64, 32)
"""Outputs that lie together, by processor: of each pair of inputs, a word of two numbers for each
output.
"""
LOOKED_AT = 8
"""Panels of a matrix that are compared."""

_widths: dict[tuple[int, int], int] = {}
"""By shape, what every matrix of it that was packed has shown."""
_rounds_alone: dict[tuple[int, int], bool] = {}
"""By shape, whether a row alone is multiplied in another order than beside a second."""


def pack_and_look(weight: torch.Tensor) -> torch.Tensor:
    """Do as `pack`, and remember how the memory lies."""
    packed = pack(weight)
    if packed.is_mkldnn and weight.dtype == torch.bfloat16:
        shape = weight.shape[0], weight.shape[1]
        found = next((each for each in WIDTHS if _lies(weight, packed, each)), 0)
        _widths[shape] = found if _widths.get(shape, found) == found else 0
        if shape not in _rounds_alone:
            _rounds_alone[shape] = _differs_alone(packed)
    return packed


def rounds_alone(weight: torch.Tensor) -> bool:
    """Return True if oneDNN gives a row alone other bits than beside other rows (decision 012)."""
    return _rounds_alone.get((weight.shape[0], weight.shape[1]), False)


def _differs_alone(packed: torch.Tensor) -> bool:
    """Compare a row alone with itself beside others.

    The bias takes the sums away, so that what is left shows bits that rounding would hide.
    """
    row = torch.randn(1, packed.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = row.repeat(2, 1)
    less = -dense_linear(rows, packed)[0]
    return not torch.equal(dense_linear(row, packed, less)[0], dense_linear(rows, packed, less)[0])


def panel_width(outputs: int, inputs: int) -> int:
    """Return which of `WIDTHS` packed matrices with this shape have as panels, one after another.

    Returns 0 if they lie in another way.
    """
    return _widths.get((outputs, inputs), 0)


def _lies(weight: torch.Tensor, packed: torch.Tensor, width: int) -> bool:
    outputs, inputs = weight.shape
    if outputs % width or inputs % 2 or torch.ops.mkldnn._nbytes(packed) != weight.nbytes:
        return False
    panels, size = outputs // width, 2 * width * inputs
    for panel in {index * (panels - 1) // (LOOKED_AT - 1) for index in range(LOOKED_AT)}:
        rows = weight[panel * width : (panel + 1) * width].contiguous()
        believed = rows.view(torch.int32).t().contiguous()
        found = (ctypes.c_char * size).from_address(address(packed) + panel * size)
        if not torch.equal(torch.frombuffer(found, dtype=torch.int32), believed.flatten()):
            return False
    return True


def address(packed: torch.Tensor) -> int:
    """Return the address of a packed matrix's memory, valid for the matrix's life."""
    found: int = torch.ops.mkldnn.data_ptr(packed)
    return found
