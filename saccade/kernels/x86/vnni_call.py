"""What the machine code for 4- and 8-bit products is called with, and the sizes that it and its
callers agree on. Owns no code.
"""

from __future__ import annotations

import ctypes

LANES = 16
"""Outputs of a vector of 32-bit sums."""
WIDE = 2
"""Vectors of outputs that are multiplied at a time."""
ROWS = 12
"""Rows that are multiplied at a time, at most: WIDE * ROWS sums fit a processor's 32 registers."""
LARGEST = 127
"""Largest value of a quantised row's number, of either sign."""
LEAST_SCALE = 1e-30
"""In place of 0, for rows of zeros."""
TILE_ROWS = 32
"""Rows that AMX multiplies at a time: two tiles of them by two of outputs."""
TILE_INPUTS = 64
"""Inputs of a tile: by AMX, inputs divide by them."""
TILE_PANELS = 4
"""Panels of outputs that AMX multiplies with the same rows in turn: rows are read that much less
often, and panels of 4,096 inputs still fit a core's second cache.
"""
ZERO = 128
"""What stands for 0 in a matrix of 8 bits."""
AHEAD_BYTES = 4096
"""How far before its use a line of a matrix is asked for: measured, decision 004."""
BLOCKS = (64, 128, 256, 512)
"""How many inputs may be transformed together (`reference/hadamard.py`)."""
LEAST_BLOCK = BLOCKS[0]
"""Inputs are padded to a multiple of so many."""
QUANTISE = {
    "quantise_4": (4, LANES),
    "quantise_8": (8, LANES),
    **{f"quantise_8_{block}": (8, block) for block in BLOCKS},
}
"""The functions that quantise rows: bits of the matrix, and inputs transformed together."""
PRODUCT = {"product_4": 4, "product_8": 8}
"""The products: bits of the matrix."""
TILED = "product_8_tiled"
"""The product of many rows by AMX."""
FORMATS = ("float32", "bfloat16", "float16")
"""Number formats of rows and results; a call names one by its place here."""
FIELDS = (
    "next",  # the first piece of work that nobody has taken: 0
    "outputs",
    "groups",
    "steps",  # turns of the innermost loop in a group
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
"""What a function is called with: 64-bit integers, from `source` on addresses."""
POINTERS = frozenset(FIELDS[FIELDS.index("source") :])
Call = ctypes.c_int64 * len(FIELDS)


def block_of(inputs: int) -> int:
    """Return how many of the inputs, a multiple of `LEAST_BLOCK`, are transformed together.

    More spread a large value further. Only all inputs in whole blocks are transformed.
    """
    return min(inputs & -inputs, BLOCKS[-1])
