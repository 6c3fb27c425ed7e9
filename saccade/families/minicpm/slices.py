"""Sizes of an image and its slices, in the arithmetic of transformers' image processor for
MiniCPM-V 4.6, to the last bit. Knows nothing of checkpoints or tokens.
"""

from __future__ import annotations

import math

from saccade.core.types import Size

MARGIN = 1.25
"""Slices have whole pixels: their shape may be so much further from a square."""


def slice_grid(size: Size, scale: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of slices, of about scale x scale pixels each; (0, 0): none.

    The numbers of slices are those around the image's pixels, from `least` to `most`; the shape is
    the one closest to the image's, and of several that of most rows.
    """
    height, width = size
    shape = math.log(width / height)
    multiple = max(min(math.ceil(width * height / (scale * scale)), most), least)
    if multiple <= 1:
        return 0, 0
    best, smallest = (1, 1), math.inf
    for count in (multiple - 1, multiple, multiple + 1):
        if count == 1 or not least <= count <= most:
            continue
        for rows in range(1, count + 1):
            if count % rows:
                continue
            error = abs(shape - math.log(count // rows / rows))
            if error < smallest or (error == smallest and rows > best[0]):
                best, smallest = (rows, count // rows), error
    return best


def view_size(size: tuple[float, float], scale: int, unit: int, *, enlarge: bool) -> Size:
    """Of a view of an image, or of a slice, in its own shape: of about scale x scale pixels, or of
    as many as it has if they are fewer, unless `enlarge`; in multiples of `unit`.
    """
    height, width = size
    if height * width > scale * scale or enlarge:
        shape = width / height
        height = int(scale / math.sqrt(shape))
        width = int(height * shape)
    return _multiple(height, unit), _multiple(width, unit)


def slice_size(size: Size, grid: tuple[int, int], scale: int, unit: int) -> Size:
    """Of each slice of an image."""
    height, width = (_multiple(edge, parts) / parts for edge, parts in zip(size, grid))
    return view_size((height, width), scale, unit, enlarge=True)


def _multiple(length: float, of: int) -> int:
    """The nearest one, of two the even one (Python's `round`), at least 1 x `of`."""
    return max(round(length / of) * of, of)


def most_tokens(scale: int, unit: int, longest: float) -> int:
    """No view has more tokens, of unit x unit pixels, than this, if one edge of the image is at
    most `longest` times the other.
    """
    # The height decides: within it, the widest view is that of the widest image.
    heights = range(int(scale / math.sqrt(longest)), int(scale * math.sqrt(longest)) + 2)
    return max(
        (
            _multiple(height, unit) * _multiple(scale * scale / height, unit) // unit**2
            for height in heights
            if height
        ),
        default=1,
    )


def most_of_all(scale: int, unit: int, most: int, longest: float) -> int:
    """The same of an image and up to `most` slices together."""
    sliced = 0
    for count in range(2, most + 1):
        # A row, or a column, of as many slices might have been chosen.
        shape = max(longest / count, count) * MARGIN
        sliced = max(sliced, count * most_tokens(scale, unit, shape))
    return most_tokens(scale, unit, longest) + sliced
