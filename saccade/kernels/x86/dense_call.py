"""What the machine code for products with bfloat16 matrices is called with, and the sizes that it
and its callers agree on. Owns no code.
"""

from __future__ import annotations

import ctypes

NAME = "product"
PANEL = 32
"""Outputs that lie together: of each pair of inputs, a word of two numbers for each."""
ROWS = 8
"""Rows that vectors multiply at a time, at most."""
TILE_ROWS = 16
"""Rows of a tile, at most."""
BLOCK = 2 * TILE_ROWS
"""Rows that tiles multiply at a time."""
TILE_INPUTS = 32
"""Inputs of a tile: matrices are padded to whole ones."""
AHEAD_BYTES = 4096
"""How far before its use a line of a matrix is asked for: measured, decision 007."""
FIELDS = (
    "next",  # the first piece that nobody has taken: 0
    "panels",
    "inputs",
    "outputs",  # without padding
    "count",  # of rows
    "portion",  # rows of a piece, in whole blocks
    "portions",
    "rows",  # bfloat16 [T, inputs]
    "words",
    "bias",  # float32 [panels * PANEL]
    "result",  # bfloat16 [T, outputs]
    "first_setting",  # of the tiles: for whole blocks, unless all rows are fewer
    "last_setting",  # for the last rows, if these are no whole block
)
"""What the function is called with: 64-bit integers, from `rows` on addresses."""
POINTERS = frozenset(FIELDS[FIELDS.index("rows") :])
Call = ctypes.c_int64 * len(FIELDS)
