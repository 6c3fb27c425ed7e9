"""What the machine code for products of few rows with bfloat16 matrices is called with, and the
sizes that it and its callers agree on. Owns no code.
"""

from __future__ import annotations

import ctypes

NAMES = ("rows_of_a_tile", "rows_of_two")
PANEL = 32
"""Outputs that lie together: of each pair of inputs, a word of two numbers for each."""
TILE_ROWS = 16
"""Rows of a tile, at most."""
MOST_ROWS = 2 * TILE_ROWS
"""More rows are oneDNN's."""
TILE_INPUTS = 32
"""Inputs of a tile: those of a matrix divide by them."""
AHEAD_BYTES = 4096
"""How far before its use a line of a matrix is asked for: measured, decision 007."""
FIELDS = (
    "next",  # the first panel that nobody has taken: 0
    "panels",
    "inputs",
    "count",  # of rows
    "rows",  # bfloat16 [T, inputs]
    "words",
    "bias",  # float32 [outputs]
    "result",  # bfloat16 [T, outputs]
    "tile_setting",
)
"""What a function is called with: 64-bit integers, from `rows` on addresses."""
POINTERS = frozenset(FIELDS[FIELDS.index("rows") :])
Call = ctypes.c_int64 * len(FIELDS)
