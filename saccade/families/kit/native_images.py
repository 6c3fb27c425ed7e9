"""Preprocessing of images at native resolution, as in Qwen-VL.

An image keeps its aspect ratio approximately. Its sides are rounded to whole tokens, and its number
of pixels is bounded. Runs without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from saccade.core.errors import CheckpointError, ImageError
from saccade.core.family import LargestImage, PixelBounds
from saccade.core.recipe import PreprocessParams, whole
from saccade.core.types import Grid, Size
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import fingerprint
from saccade.families.kit.config_readers import (
    Colour,
    read_colours,
)

MAX_ASPECT_RATIO = 200
MAX_SIDE = 16384
"""The maximum number of patches on a side of an image. With an aspect ratio of at most 200, it is
more than the default --max-image-pixels allows.
"""


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How images are resized and normalized at native resolution. Implements `ImageLayout`.

    An image's grid is (frames on its canvas, patches vertically, patches horizontally). A still
    image has one frame, and a video's canvas has two.
    """

    patch: int  # side of a patch in pixels
    merge: int  # merge x merge patches become one token
    min_pixels: int  # bounds of height * width after resizing
    max_pixels: int
    mean: Colour
    std: Colour
    resample: str = "bicubic"
    temporal_patch: int = 2

    @property
    def factor(self) -> int:
        """The side of a token in pixels. Resized heights and widths are multiples of this."""
        return self.patch * self.merge

    @property
    def pixel_bounds(self) -> PixelBounds:
        return PixelBounds(self.factor**2, self.min_pixels, self.max_pixels, as_edges=True)

    @property
    def largest_image(self) -> LargestImage:
        return LargestImage(self.max_pixels, self.max_pixels // self.factor**2)

    @property
    def sample(self) -> PreprocessParams:
        side = 4 * self.factor
        return whole((side, side), self.grid(side, side))

    @property
    def patch_unit(self) -> int:
        return self.merge**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        within = replace(self, min_pixels=bounds.min_pixels, max_pixels=bounds.max_pixels)
        size = smart_resize(height, width, within)
        if max(size) > MAX_SIDE * self.patch:
            raise ImageError(
                f"the image is {width} x {height} px; the limit is "
                f"{MAX_SIDE * self.patch} px on a side"
            )
        return whole(size, self.grid(*size), self.resample)

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        """Return the fingerprint of the preprocessing.

        The bounds are not part of it. They only affect the resized size, which is.
        """
        unit = (family, self.patch, self.merge, self.temporal_patch, self.mean, self.std)
        return fingerprint(unit, self.resample, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid for a canvas with one frame."""
        assert height % self.factor == 0 and width % self.factor == 0
        return 1, height // self.patch, width // self.patch

    def num_tokens(self, grid: Grid) -> int:
        return self.num_patches(grid) // self.merge**2

    def num_patches(self, grid: Grid) -> int:
        return math.prod(grid[1:])


Rules = TypeVar("Rules", bound=ImageRules)
CLASS_BOUNDS = (56 * 56, 28 * 28 * 1280)
"""The minimum and maximum pixels if the image processor's file has no bounds."""
NO_IMAGES = ImageRules(1, 1, 0, 0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""The rules of a checkpoint without a vision encoder."""


def smart_resize(height: int, width: int, rules: ImageRules) -> Size:
    """Return (height, width) after resizing.

    Both are multiples of `rules.factor`, and the number of pixels is within the bounds. The aspect
    ratio is approximately preserved. As in transformers, Python's `round` rounds numbers (half to
    even).

    Raises ImageError if the aspect ratio is more than 200.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        ratio = max(height, width) / max(1, min(height, width))
        raise ImageError(
            f"the image is {width} x {height} px, an aspect ratio of {ratio:.10g}; the limit is "
            f"{MAX_ASPECT_RATIO}: crop it or split it"
        )
    factor = rules.factor
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor * factor > rules.max_pixels:
        beta = math.sqrt((height * width) / rules.max_pixels)
        rows = max(1, math.floor(height / beta / factor))
        columns = max(1, math.floor(width / beta / factor))
    elif rows * columns * factor * factor < rules.min_pixels:
        beta = math.sqrt(rules.min_pixels / (height * width))
        rows = math.ceil(height * beta / factor)
        columns = math.ceil(width * beta / factor)
    return rows * factor, columns * factor


@dataclass(frozen=True, slots=True)
class RaisedRules(ImageRules):
    """Image rules that first enlarge an image if one of its sides is shorter than a token."""

    def raised(self, height: int, width: int) -> Size:
        """Return the enlarged (height, width) of an image with a side shorter than a token."""
        raise NotImplementedError

    def sized(self, size: Section) -> Self:
        """Return a copy with the bounds in `size`, which has the fields of an image processor's
        file.

        Raises CheckpointError.
        """
        raise NotImplementedError

    def bounded(self, where: str, least: int, most: int) -> Self:
        """Return a copy with bounds from `least` to `most` pixels.

        Raises CheckpointError if no image size is within them.

        where: the file or option with the bounds, for the message.
        """
        if not self.factor**2 <= most or not 0 < least <= most:
            raise CheckpointError(
                f"{where}: no image size has {least} to {most} pixels: a token has {self.factor**2}"
            )
        return replace(self, min_pixels=least, max_pixels=most)

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        # Compute this even for a small image, to raise errors with its original size.
        found = ImageRules.recipe(self, height, width, bounds)
        if min(height, width) < self.factor:
            found = ImageRules.recipe(self, *self.raised(height, width), bounds)
        return found


def read_rules(processor: Section, absent: Rules) -> Rules:
    """Return a copy of `absent` with the bounds, mean and standard deviation that the file
    specifies.

    Raises CheckpointError.

    processor: the image processor's file.
    absent: has the values of missing fields.
    """
    size = processor.section("size")
    least = size.integer("shortest_edge", "min_pixels", default=absent.min_pixels)
    most = size.integer("longest_edge", "max_pixels", default=absent.max_pixels)
    mean, std = read_colours(processor, absent.mean, absent.std)
    return replace(
        absent,
        min_pixels=processor.integer("min_pixels", default=least),
        max_pixels=processor.integer("max_pixels", default=most),
        mean=mean,
        std=std,
    )
