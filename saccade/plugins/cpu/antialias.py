"""Antialiased resizing of 8-bit RGB images, bit-identical to PyTorch's. With it, image workers need
not import PyTorch, which takes a second.

Weights are computed as by `_compute_index_ranges_int16_weights` in PyTorch's UpSampleKernel.cpp,
which follows Pillow: the filter's value for each source pixel within reach, in float64, divided by
their sum and rounded to 16 bits. The width is resized first, and the result is rounded to bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from saccade.plugins.cpu.resize import AxisWeights, resize_height, resize_width, vector_bytes
from saccade.plugins.cpu.resize_call import HEIGHT, TAPS, WIDTH

Pixels = npt.NDArray[np.uint8]
Reals = npt.NDArray[np.float64]
MAX_SHIFT = 22
LARGEST = 1 << 15
"""Weights are rounded so that they are below this limit, and fit in 16 bits."""
KEPT_SIZES = 16
"""Number of cached AxisWeights. Screenshots and video frames often have the same size."""


def resize(target: Pixels, pixels: Pixels, mode: str) -> bool:
    """Resize `pixels` to the size of `target`, and write the result to `target`. Both are [height,
    width, 3].

    mode: one of FILTERS, named as in PyTorch's `interpolate`.

    Returns False, without writing, if this CPU is not supported.
    """
    if not vector_bytes():
        return False
    (height, width, _), (rows, columns, _) = target.shape, pixels.shape
    if columns != width:
        narrow = target if rows == height else np.empty((rows, width, 3), np.uint8)
        resize_width(narrow, pixels, find_weights(columns, width, mode, TAPS[WIDTH]))
        pixels = narrow
    if rows != height:
        resize_height(target, pixels, find_weights(rows, height, mode, TAPS[HEIGHT]))
    return True


@lru_cache(KEPT_SIZES)
def find_weights(size: int, wanted: int, mode: str, taps: int) -> AxisWeights:
    """Return the weights that resize `size` pixels to `wanted` pixels.

    taps: the number of weights per target pixel is a multiple of this.
    """
    reach, weigh = FILTERS[mode]
    scale = size / wanted
    support = reach * max(scale, 1.0)
    center = scale * (np.arange(wanted) + 0.5)
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), size) - first
    count = np.clip(count, 0, 2 * math.ceil(support) + 1)
    near = np.arange(count.max())[:, None]  # [pixels in reach, wanted]
    values = weigh(np.abs((near + first - center + 0.5) * (1.0 / max(scale, 1.0))))
    values[near >= count] = 0.0
    total = values.sum(axis=0)  # adds in the order of pixels, as PyTorch does
    values /= np.where(total == 0.0, 1.0, total)
    shift = _find_shift(float(values.max()))
    values *= 1 << shift
    rounded = np.where(values < 0, values - 0.5, values + 0.5).astype(np.int16)
    return _aligned(first, rounded, count, shift, size, taps)


def _find_shift(largest: float) -> int:
    """Return the maximum number of fractional bits for which the largest weight fits in 16 bits."""
    for shift in range(MAX_SHIFT):
        if int(0.5 + largest * (1 << (shift + 1))) >= LARGEST:
            return shift
    return MAX_SHIFT


def _aligned(
    first: npt.NDArray[np.int64],
    rounded: npt.NDArray[np.int16],
    count: npt.NDArray[np.int64],
    shift: int,
    size: int,
    taps: int,
) -> AxisWeights:
    """Pad the weights to a multiple of `taps`.

    Moves the first pixel back if padded weights would otherwise read beyond the image.
    """
    most, wanted = rounded.shape
    most += -most % taps
    back = np.minimum(first, np.maximum(0, first + most - size))
    near, place = np.nonzero(np.arange(len(rounded))[:, None] < count)
    values = np.zeros((wanted, most), np.int16)
    values[place, near + back[place]] = rounded[near, place]
    return AxisWeights(first - back, values, shift)


def _linear(x: Reals) -> Reals:
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _cubic(x: Reals) -> Reals:
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: Reals) -> Reals:
    return np.where(x < 3.0, _sinc(x) * _sinc(x / 3.0), 0.0)


def _sinc(x: Reals) -> Reals:
    turned = x * math.pi
    sines = np.fromiter(
        map(math.sin, turned.ravel().tolist()), np.float64, x.size
    )  # the sine of the C library, as in PyTorch
    with np.errstate(invalid="ignore"):
        return np.where(x == 0.0, 1.0, sines.reshape(x.shape) / turned)


FILTERS: dict[str, tuple[float, Callable[[Reals], Reals]]] = {
    "bilinear": (1.0, _linear),
    "bicubic": (2.0, _cubic),
    "lanczos": (3.0, _lanczos),
}
"""For each mode, the radius of the filter in pixels of the smaller image, and its value as a
function of the distance.
"""
