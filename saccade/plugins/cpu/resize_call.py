"""What the machine code that resizes images is called with. Owns no code."""

from __future__ import annotations

import ctypes

WIDTH, HEIGHT = "resize_width", "resize_height"
NAMES = (WIDTH, HEIGHT)
"""The functions: pixels of each row become fewer or more, and then rows."""
ROWS = 4
"""Rows whose width is resized at a time."""
TAPS = {WIDTH: 4, HEIGHT: 2}
"""Source pixels, or rows, that are weighed at a time."""
FIELDS = (
    "source",  # RGB bytes
    "source_stride",  # bytes from a row to the next
    "target",
    "target_stride",
    "rows",  # of the target
    "columns",  # of the target: pixels by `resize_width`, bytes by `resize_height`
    "first",  # int64 for each pixel or row of the target: the first of the source that it weighs
    "weights",  # int16 [pixels or rows of the target, taps]
    "taps",
    "shift",  # sums have so many bits behind the point
)
POINTERS = frozenset(["source", "target", "first", "weights"])
Call = ctypes.c_int64 * len(FIELDS)
