"""Detects AMX, and creates its tile configurations."""

from __future__ import annotations

import struct
from functools import cache
from importlib.util import find_spec

import torch

from saccade.kernels.processor import has_bf16
from saccade.plugins.cpu import cpu_info


@cache
def has_amx(feature: str) -> bool:
    """Return True if this process can use AMX. feature: "amx-bf16" or "amx-int8".

    The first call requests permission from Linux, which then reserves memory for the tiles.
    """
    if find_spec("llvmlite") is None or not has_bf16():
        return False
    return feature.replace("-", "_") in cpu_info.flags() and bool(torch.cpu._init_amx())


@cache
def tile_setting(rows: int = 32) -> torch.Tensor:
    """Return the configuration of AMX's eight tiles (`ldtilecfg`). Each row of a tile has 64 bytes.

    rows: the number of rows to multiply, up to 32.

    Tiles 4 and 5 hold the rows to multiply, up to 16 each. Tiles 6 and 7 hold the matrix, 16 rows
    each. Tiles 0 to 3 hold the accumulators.
    """
    palette, used = 1, 8
    widths = struct.pack("<16H", *[64] * used, *[0] * 8)
    upper, lower = min(rows, 16), max(rows - 16, 0)
    sums = [upper, upper, lower or upper, lower or upper]
    heights = bytes([*sums, upper, lower or 16, 16, 16, *[0] * 8])
    told = bytes([palette, *[0] * 15]) + widths + heights
    return torch.frombuffer(bytearray(told), dtype=torch.uint8)
