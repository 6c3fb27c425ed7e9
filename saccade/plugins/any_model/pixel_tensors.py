"""The format of canvases that contain the output tensors of a checkpoint's own image processor, one
after another as bytes. Image workers write them, and the vision encoder reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.core.types import Size

WIDTH = 1024
"""Width of a canvas in pixels."""
ROW_BYTES = 3 * WIDTH
MIN_ROWS = 32
STEP = 8
"""Alignment of tensors in bytes."""


@dataclass(frozen=True, slots=True)
class PixelTensor:
    """Describes one tensor. `dtype` is the name of a numpy dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def canvas_size(tensors: Sequence[PixelTensor]) -> Size:
    """Return the (height, width) of a canvas that has space for these tensors."""
    end = max((start + each.nbytes for each, start in placed(tensors)), default=0)
    return max(MIN_ROWS, -(-end // ROW_BYTES)), WIDTH


def placed(tensors: Sequence[PixelTensor]) -> Iterator[tuple[PixelTensor, int]]:
    """Yield each tensor with its byte offset on the canvas."""
    at = 0
    for each in tensors:
        yield each, at
        at += -(-each.nbytes // STEP) * STEP


def write_tensors(
    canvas: npt.NDArray[np.uint8],
    tensors: Sequence[PixelTensor],
    found: Mapping[str, npt.NDArray[Any]],
) -> None:
    """Write a processor's output to a canvas uint8 [height, width, 3], and zero the rest.

    Raises ValueError if the output's names or shapes differ from `tensors`.
    """
    flat = canvas.reshape(-1)
    end = 0
    for each, start in placed(tensors):
        made = found.get(each.name)
        if made is None or made.shape != each.shape:
            shape = None if made is None else list(made.shape)
            raise ValueError(
                f"the model's processor returned {each.name} with shape {shape}; expected "
                f"{list(each.shape)} for an image of this size"
            )
        data = np.ascontiguousarray(made, np.dtype(each.dtype)).reshape(-1).view(np.uint8)
        flat[end:start] = 0
        end = start + len(data)
        flat[start:end] = data
    flat[end:] = 0
