"""Resizes 8-bit RGB images on x86 CPUs with AVX2 or AVX-512. LLVM compiles `resize_code.py` at
first use (`machine_code.py`).

The caller provides the weights of the filter (`antialias.py`). Does not import PyTorch, because
image workers run without it. Needs llvmlite, which the extra `cpu` installs.
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
"""Size of a pixel in bytes."""
WIDE = (64, "avx512bw"), (32, "avx2")
"""Vector sizes in bytes, and the CPU feature that each needs. The first supported one is used."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisWeights:
    """Weights of source pixels along one axis of an image, in fixed point."""

    first: npt.NDArray[np.int64]  # [target pixels]: index of the first source pixel of each
    values: npt.NDArray[np.int16]  # [target pixels, taps]: weights of consecutive source pixels
    shift: int  # number of fractional bits of a weight


@cache
def vector_bytes() -> int:
    """Return the size of the CPU's vectors in bytes, or 0 if resizing is not supported on it."""
    if platform.machine() != "x86_64" or find_spec("llvmlite") is None:
        return 0
    return next((size for size, name in WIDE if name in cpu_info.flags()), 0)


@cache
def functions() -> Mapping[str, Function]:
    """Return the compiled functions by name. The code is cached on disk."""
    return compiled(NAMES, "resize_code", ("resize_call", "llvm"), vector_bytes())


def resize_width(target: Pixels, source: Pixels, weights: AxisWeights) -> None:
    """Resize the width of `source` to the width of `target`, and write the result there.

    Both are [height, width, 3].
    """
    taps = weights.values.shape[1]
    assert taps % TAPS[WIDTH] == 0
    if source.shape[1] < taps:
        source = _padded(source, (source.shape[0], taps))
    _run(WIDTH, target, source, weights, target.shape[1])


def resize_height(target: Pixels, source: Pixels, weights: AxisWeights) -> None:
    """Resize the height of `source` to the height of `target`, and write the result there.

    Both are [height, width, 3].
    """
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
    """Return True if the pixels of each row are contiguous. Rows may have any stride."""
    return pixels.strides[2] == 1 and (pixels.shape[1] == 1 or pixels.strides[1] == PIXEL)


def _padded(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    image = np.zeros((*size, PIXEL), np.uint8)
    image[: pixels.shape[0], : pixels.shape[1]] = pixels
    return image
