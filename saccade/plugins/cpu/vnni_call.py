"""Arguments and block sizes shared by the int4 and int8 GEMM kernels and their callers."""

from __future__ import annotations

import ctypes

from saccade.kernels.reference.hadamard import BLOCKS

LANES = 16
"""32-bit lanes of a 512-bit vector."""
PANEL_VECTORS = 2
"""Vectors of outputs in a panel."""
ROWS = 12
"""Rows that are multiplied at a time, at most: WIDE * ROWS sums fit a processor's 32 registers."""
TILE_ROWS = 32
"""Rows that AMX multiplies at a time: two tiles of them by two of outputs."""
TILE_INPUTS = 64
"""Inputs of a tile: by AMX, inputs divide by them."""
TILE_PANELS = 4
"""Panels of outputs that AMX multiplies with the same rows in turn: rows are read that much less
often, and panels of 4,096 inputs still fit a core's second cache.
"""
ZERO = 128
"""Zero point of int8 weights, stored as unsigned bytes."""
PREFETCH_BYTES = 4096
"""Prefetch distance (measured: decision 004)."""
QUANTISE = {
    "quantise_4": (4, LANES),
    "quantise_8": (8, LANES),
    **{f"quantise_8_{block}": (8, block) for block in BLOCKS},
}
"""Functions that quantize rows: bits of the matrix, and the Hadamard block size."""
PRODUCT = {"product_4": 4, "product_8": 8}
"""GEMM functions: bits of the matrix."""
TILED = "product_8_tiled"
"""The GEMM for large batches, with AMX."""
FORMATS = ("float32", "bfloat16", "float16")
"""Dtypes of rows and results. A call refers to one by its index."""
FIELDS = (
    "next",  # the counter of claimed blocks: 0
    "outputs",
    "groups",
    "steps",  # iterations of the innermost loop per group
    "tiles",  # how many times rows are multiplied together: each time `base`
    "base",
    "extra",  # how many tiles have one row more
    "format",  # of the source, or of the result
    "unit",  # the bits of a float32 by which row_scales are multiplied
    "source",  # rows as they come, [T, inputs]
    "words",
    "scales",
    "zeros",
    "rows",  # quantised: of each tile int8 [inputs / 4, its rows, 4]
    "row_scales",  # of each tile float32 [groups, its rows]
    "sums",  # of each tile int32 [groups, its rows]: minus the sum of the row's numbers
    "result",  # [T, outputs]
    "bias",  # float32 [outputs], to whole panels
    "tile_setting",  # of AMX
)
"""Arguments of a function: 64-bit integers, from `source` on addresses."""
POINTERS = frozenset(FIELDS[FIELDS.index("source") :])
Call = ctypes.c_int64 * len(FIELDS)
