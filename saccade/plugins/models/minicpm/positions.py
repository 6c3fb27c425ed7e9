"""MiniCPM-V 4.7's rotary positions, in which image tokens have coordinates on a canvas.

The canvas is the grid of slices, with one position per token, or the whole image if there are no
slices. The tokens of the whole image are spread over the canvas. Markers have the positions of
corners: `<image>` has the position before the first corner, and `</image>` the position after the
last. The markers of a slice have the positions of its corners, and the end of a row of slices has
the position of the row's right edge. The formulas follow transformers' `get_rope_index`, and are
tested against it. Does not import torch.

```
 2 x 3 slices of 2 x 2 tokens      rows of the whole, 2 tokens     its columns, 3 tokens
 canvas: 4 x 6 positions           0 and 3                         0, 2 and 5
```
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from saccade.core.types import Grid, Span

Positions = npt.NDArray[np.int64]


def canvas_block(grid: Grid) -> Positions:
    """Return an image's positions [3, num_tokens], relative to the canvas's first corner.

    The whole image comes first, then its slices.
    """
    if len(grid) == 2:
        return _box(*(np.arange(count) for count in grid))
    rows, columns, down, across, tall, wide = grid
    whole = _box(_spread(rows, down * tall), _spread(columns, across * wide))
    slices = [
        _box(row * tall + np.arange(tall), column * wide + np.arange(wide))
        for row in range(down)
        for column in range(across)
    ]
    return np.concatenate((whole, *slices), axis=1)


def _box(rows: Positions, columns: Positions) -> Positions:
    row, column = np.meshgrid(rows, columns, indexing="ij")
    return np.stack((np.zeros_like(row), row, column)).reshape(3, -1)


def _spread(count: int, length: int) -> Positions:
    """Spread `count` tokens over `length` positions, including both ends.

    Rounds like `torch.linspace` in float32: ties round to the even position.
    """
    if count == 1:
        return np.zeros(1, np.int64)
    last, places = np.float32(length - 1), np.arange(count, dtype=np.float32)
    step = last / np.float32(count - 1)
    found = np.where(places < count // 2, step * places, last - step * places[::-1])
    return found.round().astype(np.int64)


def canvas_positions(
    tokens: Sequence[int],
    spans: Sequence[Span],
    blocks: Sequence[Positions],
    marks: Collection[int],
) -> tuple[Positions, int]:
    """Return each token's position [3, T], and the next position.

    marks: the IDs of marker tokens, such as line ends. A marker has the same position as one of its
    image's tokens.
    """
    positions = np.empty((3, len(tokens)), np.int64)
    done = following = 0
    for image, group in groupby(spans, lambda span: span.image):
        pieces, block = list(group), blocks[image]
        start, end = pieces[0].start - 1, pieces[-1].end
        while end < len(tokens) and tokens[end] in marks:
            end += 1
        # If an image directly follows another, its start marker belongs to that image's end.
        between = max(0, start - done)
        positions[:, done:start] = np.arange(following, following + between)
        origin = following + between
        positions[:, start:end] = origin
        _place_image(positions, pieces, block, origin)
        done, following = end, origin + int(block.max()) + 2
    positions[:, done:] = np.arange(following, following + len(tokens) - done)
    return positions, following + len(tokens) - done


def _place_image(positions: Positions, pieces: list[Span], block: Positions, origin: int) -> None:
    whole, *slices = pieces
    for piece in pieces:
        rows = block[:, piece.offset : piece.offset + piece.length]
        positions[:, piece.start : piece.end] = rows + origin
    height, width = block[1:].max(axis=1) + 1
    positions[1:, whole.start - 1] = max(origin - 1, 0)
    positions[1:, whole.end] = origin + height, origin + width
    for piece in slices:
        positions[:, piece.start - 1] = positions[:, piece.start]
        positions[:, piece.end] = positions[:, piece.end - 1]
    for one, other in pairwise(slices):
        between = slice(one.end + 1, other.start - 1)  # the end of a row, if any
        positions[1, between] = positions[1, one.end]
        positions[2, between] = origin + width
