"""The memory of bfloat16 matrices that oneDNN has packed, which functions of ours read: facts that
are compared with the real memory before use.
"""

from __future__ import annotations

import ctypes

import torch

from saccade.kernels.reference.linear import pack

WIDTHS = (64, 32)
"""Outputs that lie together, by processor: of each pair of inputs, a word of two numbers for each
output.
"""
LOOKED_AT = 8
"""Panels of a matrix that are compared."""

_widths: dict[tuple[int, int], int] = {}
"""By shape, what every matrix of it that was packed has shown."""


def pack_and_look(weight: torch.Tensor) -> torch.Tensor:
    """Do as `pack`, and remember how the memory lies."""
    packed = pack(weight)
    if packed.is_mkldnn and weight.dtype == torch.bfloat16:
        shape = weight.shape[0], weight.shape[1]
        found = next((each for each in WIDTHS if _lies(weight, packed, each)), 0)
        _widths[shape] = found if _widths.get(shape, found) == found else 0
    return packed


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
