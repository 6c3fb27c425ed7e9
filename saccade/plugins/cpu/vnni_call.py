"""Arguments and block sizes shared by the int4 and int8 GEMM kernels and their callers."""

from __future__ import annotations

import ctypes

from saccade.kernels.reference.hadamard import BLOCKS

LANES = 16
"""Number of 32-bit lanes in a 512-bit vector."""
PANEL_VECTORS = 2
"""Number of vectors of outputs in a panel."""
ROWS = 12
"""Maximum rows per step: PANEL_VECTORS * ROWS accumulators fit in the 32 vector registers."""
TILE_ROWS = 32
"""Rows per step with AMX: two tiles of rows, times two tiles of outputs."""
TILE_INPUTS = 64
"""Number of inputs in a tile. With AMX, the number of inputs is a multiple of it."""
TILE_PANELS = 4
"""Panels that AMX multiplies with the same rows, one after another. Rows are then read less often,
and panels with 4,096 inputs still fit in L2.
"""
ZERO = 128
"""Zero point of int8 weights, stored as unsigned bytes."""
PREFETCH_BYTES = 4096
"""Prefetch distance in bytes (measured: decision 004)."""
QUANTISE = {
    "quantise_4": (4, LANES),
    "quantise_8": (8, LANES),
    **{f"quantise_8_{block}": (8, block) for block in BLOCKS},
}
"""Functions that quantize rows, each with the number of bits of the matrix and the Hadamard block
size.
"""
PRODUCT = {"product_4": 4, "product_8": 8}
"""The GEMM functions, each with the number of bits of the matrix."""
TILED = "product_8_tiled"
"""The name of the GEMM function for large batches, which uses AMX."""
FORMATS = ("float32", "bfloat16", "float16")
"""Dtypes of rows and results. A call refers to one by its index."""
FIELDS = (
    "next",  # the counter of claimed blocks: 0
    "outputs",
    "groups",
    "steps",  # iterations of the innermost loop per group
    "tiles",  # number of tiles: rows that are multiplied together
    "base",  # rows per tile
    "extra",  # the first `extra` tiles have `base` + 1 rows
    "format",  # index in FORMATS, of the source's dtype or of the result's
    "unit",  # the bits of a float32 by which row_scales are multiplied
    "source",  # unquantized rows [T, inputs]
    "words",
    "scales",
    "zeros",
    "rows",  # quantized rows: for each tile, int8 [inputs / 4, rows of the tile, 4]
    "row_scales",  # for each tile, float32 [groups, rows of the tile]
    # for each tile, int32 [groups, rows of the tile]: the sum of the row's values, times -1 for
    # int4 weights, or times -ZERO for int8 weights
    "sums",
    "result",  # [T, outputs]
    "bias",  # float32 [outputs], padded to full panels
    "tile_setting",  # AMX tile configuration
)
"""The arguments of a function. All are 64-bit integers. Those from `source` on are addresses."""
POINTERS = frozenset(FIELDS[FIELDS.index("source") :])
Call = ctypes.c_int64 * len(FIELDS)
