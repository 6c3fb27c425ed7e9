"""Computes crops and the whole image in the same way as the published processor. Runs in image
workers.

Pillow resizes the image before it is cropped. Crops of another size and the whole image are then
resized in float32. The published processor keeps these in float32. This module rounds them to
bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torch.nn import functional as F

from saccade.core.types import Size
from saccade.plugins.models.step3_vl.images import Sides, canvas_size, plan_crops

Pixels = npt.NDArray[np.uint8]


def warm_up(argument: str) -> None:
    """Process a blank image, to trigger lazy imports and initialization."""
    sides = _read(argument)
    blank = np.zeros((sides.whole, 2 * sides.whole, 3), np.uint8)
    plan = plan_crops(blank.shape[:2], sides)
    canvas = canvas_size((plan.rows, plan.columns), sides)
    draw(np.empty((*canvas, 3), np.uint8), argument, blank)


def draw(out: Pixels, argument: str, pixels: Pixels) -> None:
    """Write the crops of an upright image, row by row, and the whole image below them to `out`."""
    sides = _read(argument)
    plan = plan_crops(pixels.shape[:2], sides)
    image = _padded(PIL.Image.fromarray(np.ascontiguousarray(pixels)), plan.padded)
    image = _resized(image, plan.resized)
    out[:] = 0
    source, window = _resized(image, plan.snapped), plan.window
    for row, column in np.ndindex(plan.rows, plan.columns):
        top, left = row * window, column * window
        crop = source.crop((left, top, left + window, top + window))
        _write(out, (row * sides.crop, column * sides.crop), crop, sides.crop)
    _write(out, (plan.rows * sides.crop, 0), image, sides.whole)


def _padded(image: PIL.Image.Image, size: Size) -> PIL.Image.Image:
    """Return a black image of this size with `image` in its top left corner."""
    if image.size == size[::-1]:
        return image
    square = PIL.Image.new(image.mode, size[::-1], 0)
    square.paste(image, (0, 0))
    return square


def _resized(image: PIL.Image.Image, size: Size) -> PIL.Image.Image:
    return image.resize(size[::-1], PIL.Image.Resampling.BILINEAR)


def _write(out: Pixels, at: tuple[int, int], image: PIL.Image.Image, side: int) -> None:
    target = out[at[0] : at[0] + side, at[1] : at[1] + side]
    if image.size == (side, side):
        target[:] = np.asarray(image)
        return
    for colour, band in enumerate(image.split()):
        values = torch.from_numpy(np.asarray(band, np.float32))[None, None]
        resized = F.interpolate(values, size=(side, side), mode="bilinear", antialias=True)
        target[..., colour] = resized[0, 0].round().clamp(0, 255).numpy()


def _read(argument: str) -> Sides:
    longest, whole, crop = (int(number) for number in argument.split())
    return Sides(longest, whole, crop)
