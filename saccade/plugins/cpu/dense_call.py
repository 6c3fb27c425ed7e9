"""Arguments and block sizes shared by the bfloat16 GEMM kernels and their callers."""

from __future__ import annotations

import ctypes

NAME = "product"
PANEL = 32
"""Number of outputs that are packed together: for each pair of inputs, one 32-bit word per
output.
"""
ROWS = 8
"""Maximum rows per step with AVX512."""
TILE_ROWS = 16
"""Maximum rows of an AMX tile."""
BLOCK = 2 * TILE_ROWS
"""Number of rows per step with AMX."""
TILE_INPUTS = 32
"""Number of inputs in a tile. The inputs of matrices are padded to a multiple of it."""
PREFETCH_BYTES = 4096
"""Prefetch distance in bytes (measured: decision 007)."""
FIELDS = (
    "next",  # the counter of claimed blocks: 0
    "panels",
    "inputs",
    "outputs",  # without padding
    "count",  # number of rows
    "portion",  # rows of a work block, a multiple of BLOCK
    "portions",  # number of work blocks per panel
    "rows",  # bfloat16 [T, inputs]
    "words",
    "bias",  # float32 [panels * PANEL]
    "result",  # bfloat16 [T, outputs]
    "first_setting",  # tile configuration for full blocks, or for all rows if they are fewer
    "last_setting",  # tile configuration for the last rows, if they do not fill a block
)
"""The arguments of the function. All are 64-bit integers. Those from `rows` on are addresses."""
POINTERS = frozenset(FIELDS[FIELDS.index("rows") :])
Call = ctypes.c_int64 * len(FIELDS)
