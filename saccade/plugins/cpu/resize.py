"""Machine code that resizes images of RGB bytes on x86 processors with AVX2: LLVM makes it from
`resize_code.py` when it is first asked for (`machine_code.py`).

Owns how it is called. Knows no filters: weights are the caller's. Imports no PyTorch, for image
workers have none. Needs llvmlite, which the extra `cpu` brings.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from saccade.plugins.cpu import cpu_info
from saccade.plugins.cpu.machine_code import Function, compiled
from saccade.plugins.cpu.resize_call import HEIGHT, NAMES, TAPS, WIDTH, Call

Pixels = npt.NDArray[np.uint8]
PIXEL = 3
"""Bytes of a pixel."""
WIDE = (64, "avx512bw"), (32, "avx2")
"""Bytes of a vector, and the instructions for these."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisWeights:
    """How source pixels are weighed along one side of an image."""

    first: npt.NDArray[np.int64]  # the first source pixel for each target pixel, int64
    values: npt.NDArray[np.int16]  # int16 [target pixels, taps], of these and the pixels behind
    shift: int  # a sum has so many bits behind the point


@cache
def vector_bytes() -> int:
    """Return the bytes of this processor's vectors, or 0 if it has none that suit."""
    if platform.machine() != "x86_64" or find_spec("llvmlite") is None:
        return 0
    return next((size for size, name in WIDE if name in cpu_info.flags()), 0)


@cache
def functions() -> Mapping[str, Function]:
    """Return the functions by name. Made once a process, and kept on disk."""
    return compiled(NAMES, "resize_code", ("resize_call", "llvm"), vector_bytes())


def resize_width(target: Pixels, source: Pixels, weights: AxisWeights) -> None:
    """Write `source` with another width to `target`, both [height, width, 3]."""
    taps = weights.values.shape[1]
    assert taps % TAPS[WIDTH] == 0
    if source.shape[1] < taps:
        source = _padded(source, (source.shape[0], taps))
    _run(WIDTH, target, source, weights, target.shape[1])


def resize_height(target: Pixels, source: Pixels, weights: AxisWeights) -> None:
    """Write `source` with another height to `target`, both [height, width, 3]."""
    taps, (height, width, _) = weights.values.shape[1], source.shape
    assert taps % TAPS[HEIGHT] == 0
    least = -(-vector_bytes() // PIXEL)
    if height < taps or width < least:
        source = _padded(source, (max(height, taps), max(width, least)))
    if width < least:
        wider = np.empty((len(target), least, PIXEL), np.uint8)
        _run(HEIGHT, wider, source, weights, PIXEL * least)
        target[:] = wider[:, :width]
        return
    _run(HEIGHT, target, source, weights, PIXEL * width)


def _run(function: str, target: Pixels, source: Pixels, weights: AxisWeights, columns: int) -> None:
    if not _back_to_back(target):
        made = np.empty(target.shape, np.uint8)
        _run(function, made, source, weights, columns)
        target[:] = made
        return
    if not _back_to_back(source):
        source = source.copy()
    said = Call(
        source.ctypes.data,
        source.strides[0],
        target.ctypes.data,
        target.strides[0],
        len(target),
        columns,
        weights.first.ctypes.data,
        weights.values.ctypes.data,
        weights.values.shape[1],
        weights.shift,
    )
    functions()[function](ctypes.addressof(said))


def _back_to_back(pixels: Pixels) -> bool:
    """Return True if each row is contiguous. Rows may have any stride."""
    return pixels.strides[2] == 1 and (pixels.shape[1] == 1 or pixels.strides[1] == PIXEL)


def _padded(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Return the pixels in the corner of a black image."""
    image = np.zeros((*size, PIXEL), np.uint8)
    image[: pixels.shape[0], : pixels.shape[1]] = pixels
    return image
