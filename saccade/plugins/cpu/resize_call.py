"""Arguments and block sizes shared by the resizing functions and their callers."""

from __future__ import annotations

import ctypes

WIDTH, HEIGHT = "resize_width", "resize_height"
NAMES = (WIDTH, HEIGHT)
"""Names of the functions."""
ROWS = 4
"""Number of rows that `resize_width` processes at a time."""
TAPS = {WIDTH: 4, HEIGHT: 2}
"""Number of source pixels or rows per loop iteration. The number of weights is a multiple of it."""
FIELDS = (
    "source",  # RGB bytes
    "source_stride",  # row stride in bytes
    "target",
    "target_stride",
    "rows",  # number of rows of the target
    "columns",  # width of the target: in pixels for `resize_width`, in bytes for `resize_height`
    "first",  # int64 [pixels or rows of the target]: index of the first source pixel or row
    "weights",  # int16 [pixels or rows of the target, taps]
    "taps",
    "shift",  # number of fractional bits of a weight
)
POINTERS = frozenset(["source", "target", "first", "weights"])
Call = ctypes.c_int64 * len(FIELDS)
